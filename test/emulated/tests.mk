# The CUDA backend without a GPU: cuda/ compiled by a compiler of C++, its threads as fibers; see threads.h.
# make test-emulated EMULATED="--name band --dtype bf16"; EMULATED_SM=90 make ... takes Hopper's kernels.

EMULATED_BUILD := $(BUILD)/emulated
EMULATED ?= --quick

.PHONY: test-emulated
test-emulated: $(EMULATED_BUILD)/test_hopper
	$(EMULATED_BUILD)/test_hopper
	$(MAKE) --no-print-directory FA_CUDA=emulated BUILD=$(EMULATED_BUILD) PRIV=$(EMULATED_BUILD)/priv XLA_FFI_INCLUDE= \
	  $(EMULATED_BUILD)/test/test_attention
	$(EMULATED_BUILD)/test/test_attention --device cuda $(EMULATED)

# What is emulated of Hopper, by itself: without threads and kernels.
$(EMULATED_BUILD)/test_hopper: test/emulated/test_hopper.cpp test/emulated/hopper_product.cpp $(wildcard test/emulated/*.h)
	@mkdir -p $(@D)
	$(call show,CXX $<)$(or $(filter-out default,$(CXX)),c++) -std=c++17 $(CFLAGS) -Wall -Wextra -Itest/emulated/include $(SANITIZE_FLAGS) \
	  -o $@ $(filter %.cpp,$^)
