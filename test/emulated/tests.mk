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
EMULATED_TESTS := $(addprefix $(EMULATED_BUILD)/test/test_,emulated attention slices calls)

.PHONY: test-emulated
ifeq ($(findstring linux,$(TARGET))$(shell command -v $(CXX)),linux)
test-emulated:
	@echo "$@: skipped, there is no compiler of C++"
else ifeq ($(findstring linux,$(TARGET)),)
test-emulated:
	@echo "$@: skipped, it finds a thread's shared memory as Linux lays it out"
else
test-emulated: $(EMULATED_BUILD)/test_hopper
	$(EMULATED_BUILD)/test_hopper
	$(MAKE) --no-print-directory FA_CUDA=emulated BUILD=$(EMULATED_BUILD) PRIV=$(EMULATED_BUILD)/priv XLA_FFI_INCLUDE= \
	  $(EMULATED_TESTS)
	$(EMULATED_BUILD)/test/test_emulated
	@set -e; for sm in 80 90; do \
	  echo "test_attention --device cuda $(EMULATED), emulated sm_$$sm"; \
	  EMULATED_SM=$$sm $(EMULATED_BUILD)/test/test_attention --device cuda $(EMULATED); \
	  echo "test_slices cuda, emulated sm_$$sm"; EMULATED_SM=$$sm $(EMULATED_BUILD)/test/test_slices cuda; \
	  echo "test_calls, emulated sm_$$sm"; EMULATED_SM=$$sm $(EMULATED_BUILD)/test/test_calls; \
	done
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
