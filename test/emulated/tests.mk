# The CUDA backend without a GPU: cuda/ compiled by a compiler of C++, its threads as fibers; see threads.h.
# make test-emulated EMULATED="--name band --dtype bf16"

EMULATED_BUILD := $(BUILD)/emulated
EMULATED ?= --quick

.PHONY: test-emulated
test-emulated:
	$(MAKE) --no-print-directory FA_CUDA=emulated BUILD=$(EMULATED_BUILD) PRIV=$(EMULATED_BUILD)/priv XLA_FFI_INCLUDE= \
	  $(EMULATED_BUILD)/test/test_attention
	$(EMULATED_BUILD)/test/test_attention --device cuda $(EMULATED)
