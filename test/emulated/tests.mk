# The CUDA backend without a GPU: cuda/ compiled by a compiler of C++, its threads as fibers; see threads.h.
#
#   make test-emulated                                              what make test runs
#   make test-emulated EMULATED="--quick --dtype f32 --sweep 0"     other cases of test_attention, on both kinds of GPU
#   EMULATED_MULTIPROCESSORS=5 EMULATED_SEED=2 make test-emulated   another GPU, another order of its threads

ifeq ($(origin CXX),default)
CXX := c++
endif
EMULATED_BUILD := $(BUILD)/emulated
EMULATED       ?= --quick --sweep 0 --name band --dtype bf16
EMULATED_TESTS := $(addprefix $(EMULATED_BUILD)/test/test_,emulated attention slices calls isolation extremes decode cache cuda)

.PHONY: test-emulated
ifeq ($(findstring linux,$(TARGET))$(shell command -v $(CXX)),linux)
test-emulated:
	@echo "$@: skipped, there is no compiler of C++"
else ifeq ($(findstring linux,$(TARGET)),)
test-emulated:
	@echo "$@: skipped, it finds a thread's shared memory as Linux lays it out"
else
# The longest first.
EMULATED_RUNS := $(foreach test,isolation slices,test-emulated-$(test)-80 test-emulated-$(test)-90) \
                 test-emulated-parts test-emulated-boxes test-emulated-masks test-emulated-decode-86 test-emulated-decode-90 \
                 test-emulated-few-80 test-emulated-few-90 $(foreach test,cache attention extremes calls,test-emulated-$(test)-80 test-emulated-$(test)-90)

.PHONY: test-emulated-hopper test-emulated-itself emulated-programs $(EMULATED_RUNS)
test-emulated: test-emulated-hopper test-emulated-itself $(EMULATED_RUNS)

test-emulated-hopper: $(EMULATED_BUILD)/test_hopper
	@echo "$(<F)"
	@$<

emulated-programs:
	@$(MAKE) --no-print-directory FA_CUDA=emulated BUILD=$(EMULATED_BUILD) PRIV=$(EMULATED_BUILD)/priv XLA_FFI_INCLUDE= \
	  $(EMULATED_TESTS)

test-emulated-itself: emulated-programs
	@echo test_emulated
	@$(EMULATED_BUILD)/test/test_emulated

test-emulated-attention-80 test-emulated-attention-90: test-emulated-attention-%: emulated-programs
	@echo "test_attention --device cuda $(EMULATED), emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_attention --device cuda $(EMULATED)

# Biases that only kernels for Hopper copy by tensor maps.
test-emulated-boxes: emulated-programs
	@echo "test_attention --device cuda --quick --sweep 0 --name boxes --dtype bf16, emulated sm_90"
	@EMULATED_SM=90 $(EMULATED_BUILD)/test/test_attention --device cuda --quick --sweep 0 --name boxes --dtype bf16

# A backward of few rows; and many rows beside few keys.
test-emulated-few-80 test-emulated-few-90: test-emulated-few-%: emulated-programs
	@for name in "all see all" "one column block"; do \
	  echo "test_attention --device cuda --sweep 0 --name \"$$name\" --dtype bf16, emulated sm_$*"; \
	  EMULATED_SM=$* $(EMULATED_BUILD)/test/test_attention --device cuda --sweep 0 --name "$$name" --dtype bf16 || exit 1; \
	done

# Lengths and pages, which the kernels for few rows take; on a GPU with the least shared memory, too.
test-emulated-decode-86: export EMULATED_SHARED_KIB := 99
test-emulated-decode-86 test-emulated-decode-90: test-emulated-decode-%: emulated-programs
	@echo "test_decode, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_decode
	@echo "test_attention --device cuda --pages --sweep 200, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_attention --device cuda --pages --sweep 200

# Masks that show everything, and of which a kernel asks; and one that hides a block from half of a tile's rows.
test-emulated-masks: emulated-programs
	@echo "test_cuda --masks, emulated sm_90"
	@EMULATED_SM=90 $(EMULATED_BUILD)/test/test_cuda --masks
	@echo "test_attention --device cuda --quick --sweep 0 --name \"half a tile\" --dtype f32, emulated sm_90"
	@EMULATED_SM=90 $(EMULATED_BUILD)/test/test_attention --device cuda --quick --sweep 0 --name "half a tile" --dtype f32

# Keys that are split over multiprocessors which would have nothing to do.
test-emulated-parts: emulated-programs
	@echo "test_attention --device cuda --quick --sweep 0 --name parts --dtype bf16, emulated sm_90"
	@EMULATED_SM=90 EMULATED_MULTIPROCESSORS=9 $(EMULATED_BUILD)/test/test_attention --device cuda --quick --sweep 0 --name parts --dtype bf16

test-emulated-slices-80 test-emulated-slices-90: test-emulated-slices-%: emulated-programs
	@echo "test_slices cuda, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_slices cuda

test-emulated-isolation-80 test-emulated-isolation-90: test-emulated-isolation-%: emulated-programs
	@echo "test_isolation cuda, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_isolation cuda

test-emulated-extremes-80 test-emulated-extremes-90: test-emulated-extremes-%: emulated-programs
	@echo "test_extremes cuda, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_extremes cuda

test-emulated-cache-80 test-emulated-cache-90: test-emulated-cache-%: emulated-programs
	@echo "test_cache cuda, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_cache cuda

test-emulated-calls-80 test-emulated-calls-90: test-emulated-calls-%: emulated-programs
	@echo "test_calls, emulated sm_$*"
	@EMULATED_SM=$* $(EMULATED_BUILD)/test/test_calls
endif

ifeq ($(FA_CUDA),emulated)
$(BUILD)/test/test_emulated: test/emulated/test_emulated.cpp $(EMULATOR)
	@mkdir -p $(@D)
	$(CXX) $(CUDA_CFLAGS) -MMD -MP -o $@ $< -x none $(EMULATOR) -pthread
endif

# Calls of the whole library.
ifeq ($(FA_CUDA),emulated)
$(BUILD)/test/test_calls: test/emulated/test_calls.cpp $(OBJECTS)
	@mkdir -p $(@D)
	$(CXX) $(CUDA_CFLAGS) -MMD -MP -o $@ $< -x none $(OBJECTS) $(FA_LDFLAGS) $(CUDA_LIBS) -lm
endif

# What is emulated of Hopper, by itself: without threads and kernels.
$(EMULATED_BUILD)/test_hopper: test/emulated/test_hopper.cpp test/emulated/hopper_product.cpp $(wildcard test/emulated/*.h)
	@mkdir -p $(@D)
	$(call show,CXX $<)$(CXX) -std=c++17 $(CFLAGS) -Wall -Wextra -Itest/emulated/include $(SANITIZE_FLAGS) \
	  -o $@ $(filter %.cpp,$^)
