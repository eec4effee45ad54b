# Tests of flash_attention_truth.h: its examples, which compare themselves, faults that are planted in them, and a
# program of small kernels. C++ is needed by nothing else.

ifeq ($(origin CXX),default)
CXX := c++
endif
HAS_CXX := $(shell command -v $(CXX))

# `make test` brings it where it may, and goes on without it where it may not.
NEEDED  += $(if $(HAS_CXX)$(filter-out test,$@)$(filter 0,$(FA_INSTALL)),,g++)

# What this compiler has of the flags that not all have: GCC the first from 12 on, Clang the second, which keeps its
# own handler of indices out of bounds away.
TRUTH_OPTIONAL = $(eval TRUTH_OPTIONAL := $(foreach flag,-ftrivial-auto-var-init=pattern -fno-sanitize-link-runtime,\
  $(shell echo 'int x;' | $(CXX) $(flag) -x c++ -c - -o /dev/null 2>/dev/null && echo $(flag))))$(TRUTH_OPTIONAL)
TRUTH_CXXFLAGS = -std=c++17 -O1 $(TRUTH_OPTIONAL) -fsanitize=bounds -Ic_src -Iexamples/truth -Itest/c \
                 -Wall -Wextra $(if $(WERROR),-Werror)

TRUTH_BUILD    := $(BUILD)/test/truth
TRUTH_EXAMPLES := $(patsubst examples/truth/%.cpp,%,$(wildcard examples/truth/*.cpp))
TRUTH_PROGRAMS := $(TRUTH_EXAMPLES:%=$(TRUTH_BUILD)/%) $(TRUTH_BUILD)/test_truth $(TRUTH_BUILD)/test_faults \
                  $(TRUTH_BUILD)/test_library $(TRUTH_BUILD)/libtruth_kernels.so

-include $(wildcard $(TRUTH_BUILD)/*.d)

$(TRUTH_EXAMPLES:%=$(TRUTH_BUILD)/%): $(TRUTH_BUILD)/%: examples/truth/%.cpp test/truth/tests.mk
	@mkdir -p $(@D)
	$(CXX) $(TRUTH_CXXFLAGS) -MMD -MP -o $@ $<

$(TRUTH_BUILD)/test_truth: test/truth/test_truth.cpp test/truth/tests.mk
	@mkdir -p $(@D)
	$(CXX) $(TRUTH_CXXFLAGS) -MMD -MP -o $@ $<

$(TRUTH_BUILD)/libtruth_kernels.so: test/truth/library.cpp test/truth/tests.mk
	@mkdir -p $(@D)
	$(CXX) $(TRUTH_CXXFLAGS) -shared -fPIC -fvisibility=hidden -MMD -MP -o $@ $<

$(TRUTH_BUILD)/test_library: test/truth/test_library.c test/truth/tests.mk
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -Ic_src -Itest/c -Wall -Wextra $(if $(WERROR),-Werror) -MMD -MP -o $@ $< -ldl -lm

# Code with faults in it draws warnings.
$(TRUTH_BUILD)/test_faults: test/truth/test_faults.cpp test/truth/faults.txt test/truth/plant.awk test/truth/tests.mk \
                            $(wildcard examples/truth/*)
	@mkdir -p $(@D)
	awk -v examples=examples/truth -v into=$(TRUTH_BUILD) -f test/truth/plant.awk test/truth/faults.txt
	$(CXX) $(TRUTH_CXXFLAGS) -w -I$(TRUTH_BUILD) $(if $(findstring pattern,$(TRUTH_OPTIONAL)),-DHAS_PATTERN) -MMD -MP -o $@ $<

.PHONY: test-truth
ifeq ($(HAS_CXX),)
test-truth:
	@echo "$@: EXCLUDED, there is no C++ compiler ($(CXX))"
else
test-truth: $(TRUTH_PROGRAMS)
	@set -e; for example in $(TRUTH_EXAMPLES); do \
	  echo "$$example"; $(TRUTH_BUILD)/$$example; echo "1 passed, 0 failed, 0 skipped"; \
	done
	@echo test_truth; $(TRUTH_BUILD)/test_truth $(TRUTH_BUILD)
	@echo test_faults; $(TRUTH_BUILD)/test_faults
	@echo test_library; $(TRUTH_BUILD)/test_library $(TRUTH_BUILD)/libtruth_kernels.so
endif
