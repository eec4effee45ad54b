# cuda/ compiled for the CPU, by a compiler of C++ in place of nvcc, with what emulates a GPU and its runtime.

ifeq ($(origin CXX),default)
CXX := c++
endif
EMULATED_FLAGS := -std=c++17 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -Wno-sign-compare -Wno-psabi \
                  -Wno-sizeof-array-div -fno-exceptions -fno-threadsafe-statics -fno-strict-aliasing -pthread \
                  -D_GNU_SOURCE -Itest/emulated -Itest/emulated/include $(SANITIZE_FLAGS)
NVCC         := $(CXX)
# Compiling takes longer than running: kernels are not optimised much.
CUDA_CFLAGS  := $(EMULATED_FLAGS) -O1 -g1 -include language.h -x c++
CUDA_ARCHS   :=
HOPPER_ARCH  :=
# Nothing waits for the CPU's kernels here either.
KERNELS_LEVEL := -O1
CUDA_INCLUDE := test/emulated/include
CUDA_LIBS    := -lstdc++

EMULATOR := $(patsubst test/emulated/%.cpp,$(BUILD)/emulated/%.o,$(filter-out test/emulated/test_%,$(wildcard test/emulated/*.cpp)))

ifdef FA_LOCKED
$(EMULATOR): $(BUILD)/emulated/%.o: test/emulated/%.cpp $(BUILD)/cuda.flags Makefile
	@mkdir -p $(@D)
	$(call show,CXX $<)$(CXX) $(CFLAGS) $(EMULATED_FLAGS) -O3 -MMD -MP -c -o $@ $<
endif
