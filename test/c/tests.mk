# The C tests: one program a file, each ending in "N passed, N failed, N skipped".

# The longest first: make begins with them, and has the others beside them.
TEST_NAMES  := tolerance attention tangent isolation host merge slices core bands cache decode dropout half pages reference extremes cells cuda
TEST_SHARED := $(BUILD)/test/harness.o $(BUILD)/test/cases.o $(BUILD)/test/tolerance.o

$(BUILD)/test/%.o: test/c/%.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -MMD -MP -c -o $@ $<

# Made of the library's objects: they look behind the public header. What the library exports is the examples' to
# test, and check-deps'.
$(BUILD)/test/test_%: $(BUILD)/test/test_%.o $(TEST_SHARED) $(OBJECTS)
	$(CC) -o $@ $(filter-out $(REPLACED),$^) $(FA_LDFLAGS) $(CUDA_LIBS) -lm

# Under a sanitizer the reference takes most of the time of tests that only hold others against it: these have it as it
# is elsewhere. The others have it sanitized, test_reference and test_tolerance above all, which test it.
ORACLE := $(if $(SANITIZE),$(BUILD)/test/oracle.o)
# Private: the file of flags, which it depends on, has those of the others.
$(BUILD)/test/oracle.o: private SANITIZE_FLAGS :=
$(BUILD)/test/oracle.o: c_src/cpu/reference.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -O3 -MMD -MP -c -o $@ $<

ORACLE_TESTS := $(addprefix $(BUILD)/test/test_,attention tiles tangent isolation)
$(ORACLE_TESTS): $(ORACLE)
$(ORACLE_TESTS): REPLACED := $(if $(ORACLE),$(BUILD)/cpu/reference.o)

# The thread sanitizer need not follow each double of the harness, which has one thread and no other's memory but the
# tensors: those it copies and compares whole, which the sanitizer sees wherever it is called from.
ifneq ($(filter thread,$(SANITIZE)),)
$(TEST_SHARED): private SANITIZE_FLAGS :=
endif

$(BUILD)/test/test_host: $(BUILD)/test/fake_gpu.o

.SECONDARY: $(TEST_NAMES:%=$(BUILD)/test/test_%.o) $(TEST_SHARED)

# Three threads, however small the case and however few the processors.
TEST_ENVIRONMENT := FLASH_ATTENTION_NUM_THREADS=3

# make test-c ATTENTION="--device cuda --sweep 5000" and the like; see test_attention.c. It has a process for each type:
# the oracle, which has one thread, takes most of the time.
ATTENTION_TYPES ?= bf16 f16 f32 f64

.PHONY: test-c-tiles test-c-examples test-c test-c-sanitize test-c-isas test-c-attention-cuda test-cuda-sanitize fuzz-bands $(TEST_NAMES:%=test-c-%) \
        $(ATTENTION_TYPES:%=test-c-attention-of-%)
test-c: $(TEST_NAMES:%=test-c-%) test-c-tiles test-c-examples test-c-attention-cuda $(if $(filter 1,$(FA_CUDA)),test-cuda-sanitize)

$(filter-out test-c-attention,$(TEST_NAMES:%=test-c-%)): test-c-%: $(BUILD)/test/test_%
	@echo "$(<F) $($*_TYPES)"
	@$(TEST_ENVIRONMENT) $< $($*_TYPES)

test-c-attention: $(ATTENTION_TYPES:%=test-c-attention-of-%)
$(ATTENTION_TYPES:%=test-c-attention-of-%): test-c-attention-of-%: $(BUILD)/test/test_attention
	@echo "$(<F) --dtype $* $(ATTENTION)"
	@$(TEST_ENVIRONMENT) $< --dtype $* $(ATTENTION)

# The kernels that multiply tiles (AMX), on a processor that need not have them: there these are emulated.
ifneq ($(filter amx,$(ISAS)),)
TILE_OBJECTS := $(BUILD)/test/tiles_kernels.o $(BUILD)/test/tiles_backend.o
$(BUILD)/test/tiles_%.o: c_src/cpu/%.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) $(KERNELS_LEVEL) -ffp-contract=fast $(if $(filter kernels,$*),$(ISA_FLAGS_avx512bf16)) -DFA_ISA=amx -DFA_ISA_amx \
	  -DFA_EMULATED_TILES -MMD -MP -c -o $@ $<
$(BUILD)/test/test_tiles: $(BUILD)/test/test_attention.o $(TEST_SHARED) $(OBJECTS) $(TILE_OBJECTS)
	$(CC) -o $@ $(filter-out $(REPLACED) $(BUILD)/cpu/kernels_amx.o $(BUILD)/cpu/backend.o,$^) $(FA_LDFLAGS) $(CUDA_LIBS) -lm
test-c-tiles: $(BUILD)/test/test_tiles
	@echo "$(<F) --quick --dtype bf16"
	@if grep -qw avx512_bf16 /proc/cpuinfo; then FLASH_ATTENTION_DISABLE= $(TEST_ENVIRONMENT) $< --quick --dtype bf16; \
	  else echo "skipped: tiles are emulated beside AVX512-BF16, which this processor does not have"; fi
else
test-c-tiles:
endif

# The examples, on every kind of device: what they print is known, or why they are skipped.
$(BUILD)/test/on_device: examples/on_device.c $(LIBRARY) $(FLAGS)
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -Ic_src -o $@ $< $(FA_LDFLAGS) -L$(BUILD) -Wl,-rpath,'$$ORIGIN/..' -lflash_attention

ON_DEVICE := forward: 0 bytes up, 0 down;backward: 0 bytes up, 0 down;dv: 2 1;
test-c-examples: $(BUILD)/test/on_device
	@for device in cpu cuda; do \
	  printf '%s\n' "$(<F) $$device"; result=$$($< $$device | tr '\n' ';'); \
	  case "$$result" in skipped:*) printf '%s\n' "$$result" ;; '$(ON_DEVICE)') ;; \
	    *) printf 'FAILED: %s\n' "$$result"; exit 1 ;; esac; \
	done

# The same programs, on the short table, under the address and undefined behaviour sanitizers, and on one type under
# the thread sanitizer, with one instruction set: all have the same threads. A test asks for petabytes, which the
# address sanitizer is to refuse as malloc does. To the oracle all types but f64 are the same, once a number is read,
# and under a sanitizer it takes five times as long.
test-c-sanitize: test-c-addresses test-c-races

test-c-addresses:
	UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1 $(MAKE) --no-print-directory test-c SANITIZE=address,undefined FA_CUDA=0 \
	  BUILD=$(BUILD)/sanitize PRIV=$(BUILD)/sanitize/priv ATTENTION=--quick tolerance_TYPES='f16 f64'

test-c-races:
	FLASH_ATTENTION_DISABLE= $(MAKE) --no-print-directory test-c-host test-c-attention SANITIZE=thread FA_CUDA=0 \
	  BUILD=$(BUILD)/races PRIV=$(BUILD)/races/priv ATTENTION=--quick ATTENTION_TYPES=f32

# What test_attention does by itself: with the CPU's instruction sets switched off, the best one first; and its table
# with a GPU's kernels for Hopper switched off. Neither tangents nor merges are computed in bf16.
ISA_TESTS          := tangent isolation extremes merge
ISA_RUNS           := $(foreach isa,avx512 avx2,$(ISA_TESTS:%=test-c-without-$(isa)-%)) \
                      $(addprefix test-c-without-avx512bf16-,isolation extremes)
WITHOUT_avx512bf16 := amx,avx512bf16
WITHOUT_avx512     := avx512
WITHOUT_avx2       := avx512,avx2

.PHONY: test-c-addresses test-c-races test-c-without-sm90 $(ISA_RUNS)
test-c-isas: $(ISA_RUNS) test-c-without-sm90

$(foreach test,$(ISA_TESTS),$(eval $(filter %-$(test),$(ISA_RUNS)): $(BUILD)/test/test_$(test)))
$(ISA_RUNS): test-c-without-%:
	@echo "$(<F) without $(WITHOUT_$(firstword $(subst -, ,$*)))"
	@FLASH_ATTENTION_DISABLE=$(WITHOUT_$(firstword $(subst -, ,$*))) $(TEST_ENVIRONMENT) $< $(if $(filter %-isolation,$*),cpu)

test-c-without-sm90: $(BUILD)/test/test_attention
	@echo "$(<F) --device cuda $(ATTENTION), without sm90"
	@FLASH_ATTENTION_DISABLE=sm90 $< --device cuda $(ATTENTION)

# The case table on the GPU, and some problems of its size. Without one this program and test_cuda say that they are
# skipped.
test-c-attention-cuda: $(BUILD)/test/test_attention $(BUILD)/test/test_merge
	@echo "$(<F) --device cuda $(ATTENTION)"
	@$< --device cuda $(ATTENTION)
	@echo "$(<F) --device cuda --grow 4"
	@$< --device cuda --grow 4
	@echo "test_merge --device cuda"
	@$(BUILD)/test/test_merge --device cuda

# Short tables on the GPU under NVIDIA's compute-sanitizer: addresses, races in shared memory, and reads of what
# nothing wrote. test_attention gives every tensor an allocation of its own, test_cuda poisons no workspace. initcheck
# does not see what bulk copies write, and so is not asked about results that are copied to the host; racecheck takes
# a build of its own (see cuda/hopper.cuh).
RACECHECKED   = $(BUILD)/racecheck
CUDA_SANITIZE = FLASH_ATTENTION_CACHE=0 compute-sanitizer --error-exitcode 1 --print-limit 10 --tool

test-cuda-sanitize: $(BUILD)/test/test_attention $(BUILD)/test/test_bands $(BUILD)/test/test_cuda
ifeq ($(shell command -v compute-sanitizer),)
	@echo "$@: skipped, compute-sanitizer is not installed"
else
	$(CUDA_SANITIZE) memcheck $(BUILD)/test/test_attention --device cuda --quick
	$(CUDA_SANITIZE) memcheck $(BUILD)/test/test_bands --device cuda --rounds 40
	$(MAKE) --no-print-directory $(RACECHECKED)/test/test_cuda BUILD=$(RACECHECKED) PRIV=$(RACECHECKED)/priv NVCCFLAGS=-DFA_RACECHECK
	$(CUDA_SANITIZE) racecheck $(RACECHECKED)/test/test_cuda --quick
	$(CUDA_SANITIZE) initcheck --check-api-memory-access no $(BUILD)/test/test_cuda --quick
endif

# Random problems of a GPU's size for as long as one likes: make -j3 sweep-cuda GROW=8 SWEEP=1000 SEED=5
GROW   ?= 6
SWEEP  ?= 100
SWEEPS := $(patsubst %,sweep-cuda-of-%,$(filter-out f64,$(ATTENTION_TYPES)))
.PHONY: sweep-cuda $(SWEEPS)
sweep-cuda: $(SWEEPS)
$(SWEEPS): sweep-cuda-of-%: $(BUILD)/test/test_attention
	@echo "$(<F) --device cuda --dtype $* --grow $(GROW) --sweep $(SWEEP) --seed $(SEED)"
	@$< --device cuda --dtype $* --grow $(GROW) --sweep $(SWEEP) --seed $(SEED)

# Bands of random integers for as long as one likes: on the CPU under the address sanitizer, and on a GPU, if one is there,
# under compute-sanitizer. make fuzz-bands ROUNDS=1000 SEED=5
ROUNDS ?= 200
SEED   ?= 1
fuzz-bands: $(BUILD)/test/test_bands
	$(MAKE) --no-print-directory $(BUILD)/sanitize/test/test_bands SANITIZE=address,undefined FA_CUDA=0 \
	  BUILD=$(BUILD)/sanitize PRIV=$(BUILD)/sanitize/priv
	$(TEST_ENVIRONMENT) $(BUILD)/sanitize/test/test_bands --rounds $(ROUNDS) --seed $(SEED)
	$(BUILD)/test/test_bands --rounds $(ROUNDS) --seed $(SEED) --device cuda
	$(if $(shell command -v compute-sanitizer),$(CUDA_SANITIZE) memcheck $(BUILD)/test/test_bands --rounds $(ROUNDS) --seed $(SEED) --device cuda,\
	  @echo "compute-sanitizer is not installed")
