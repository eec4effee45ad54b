# The C tests: one program a file, each ending in "N passed, N failed, N skipped".

TEST_NAMES  := core half reference tangent attention
TEST_SHARED := $(BUILD)/test/harness.o $(BUILD)/test/cases.o

$(BUILD)/test/%.o: test/c/%.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -MMD -MP -c -o $@ $<

# The library is found where it was built, wherever that is.
$(BUILD)/test/test_%: $(BUILD)/test/test_%.o $(TEST_SHARED) $(LIBRARY)
	$(CC) -o $@ $< $(TEST_SHARED) $(FA_LDFLAGS) -L$(PRIV) -Wl,-rpath,$(abspath $(PRIV)) -lflash_attention -lm

.SECONDARY: $(TEST_NAMES:%=$(BUILD)/test/test_%.o) $(TEST_SHARED)

# More threads than processors, on purpose: they had better not spin while they wait.
TEST_ENVIRONMENT := OMP_WAIT_POLICY=passive

# make test-c ATTENTION="--device cuda --sweep 5000" and the like; see test_attention.c
.PHONY: test-c test-c-sanitize test-c-isas $(TEST_NAMES:%=test-c-%)
test-c: $(TEST_NAMES:%=test-c-%)

$(TEST_NAMES:%=test-c-%): test-c-%: $(BUILD)/test/test_%
	@echo "$(<F) $(if $(filter attention,$*),$(ATTENTION))"
	@$(TEST_ENVIRONMENT) $< $(if $(filter attention,$*),$(ATTENTION))

# The same programs, on the short table, under the address and undefined behaviour sanitizers.
test-c-sanitize:
	UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test-c SANITIZE=address,undefined FA_CUDA=0 \
	  BUILD=$(BUILD)/sanitize PRIV=$(BUILD)/sanitize/priv ATTENTION=--quick

# The suite with the CPU's instruction sets switched off, the best one first.
test-c-isas: $(BUILD)/test/test_attention $(BUILD)/test/test_tangent
	@set -e; for isas in avx512 avx512,avx2; do \
	  echo "without $$isas"; export FLASH_ATTENTION_DISABLE=$$isas $(TEST_ENVIRONMENT); \
	  $(BUILD)/test/test_attention $(ATTENTION); $(BUILD)/test/test_tangent; \
	done
