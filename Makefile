# FlashAttention: builds priv/libflash_attention.so and, where Erlang's headers are, priv/flash_attention_nif.so.
#
#   make            build                        make test     build and run every test
#   make demo       build and train a model      make bench    speed and memory on this machine
#   make check-deps one-way dependencies         make format   rewrite sources in the house style
#
# Variables: CC, CFLAGS, NVCC, FA_CUDA=0 (no CUDA), SANITIZE=address,undefined, BUILD (objects), PRIV (libraries).

CC      ?= cc
CFLAGS  ?= -O2 -g
BUILD   ?= build
PRIV    ?= priv
PYTHON  ?= python3

WARNINGS := -Wall -Wextra -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla
override CFLAGS += -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math \
                   -fopenmp $(WARNINGS) $(if $(WERROR),-Werror)
LDFLAGS += -fopenmp -Wl,-z,nodelete
ifdef SANITIZE
override CFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer
LDFLAGS += -fsanitize=$(SANITIZE)
endif

LIBRARY := $(PRIV)/libflash_attention.so
NIF     := $(PRIV)/flash_attention_nif.so

# ---- the library -----------------------------------------------------------------------------------

# The CPU kernels are one source, compiled once for every instruction set.
CPU_ISAS_x86_64  := avx2 avx512
CPU_ISAS         := plain $(CPU_ISAS_$(shell uname -m))
ISA_FLAGS_plain  :=
ISA_FLAGS_avx2   := -mavx2 -mfma
ISA_FLAGS_avx512 := -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512

KERNELS := c_src/cpu/kernels.c
SOURCES := $(filter-out $(KERNELS),$(wildcard c_src/core/*.c c_src/cpu/*.c))
OBJECTS := $(SOURCES:c_src/%.c=$(BUILD)/%.o) \
           $(if $(wildcard $(KERNELS)),$(CPU_ISAS:%=$(BUILD)/cpu/kernels_%.o))

# ---- CUDA, where nvcc is ---------------------------------------------------------------------------

NVCC    ?= nvcc
FA_CUDA ?= $(if $(shell command -v $(NVCC) 2>/dev/null),1,0)
CUDA_SOURCES := $(wildcard cuda/*.cu)
ifeq ($(CUDA_SOURCES),)
override FA_CUDA := 0
endif

.PHONY: all
all: $(LIBRARY) $(NIF)

$(LIBRARY): $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) -shared -o $@ $^ $(LDFLAGS) -lm

$(BUILD)/%.o: c_src/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/cpu/kernels_%.o: $(KERNELS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -O3 -ffp-contract=fast $(ISA_FLAGS_$*) -DFA_ISA=$* -DFA_ISA_$* -MMD -MP -c -o $@ $<

# ---- the NIF ---------------------------------------------------------------------------------------

ERL     ?= erl
ERL_INCLUDE ?= $(shell $(ERL) -noshell -eval 'io:format("~ts/erts-~ts/include", [code:root_dir(), erlang:system_info(version)]), halt().' 2>/dev/null)
NIF_SOURCES := $(wildcard c_src/nif/*.c)
NIF_OBJECTS := $(NIF_SOURCES:c_src/%.c=$(BUILD)/%.o)

$(NIF_OBJECTS): override CFLAGS += -I$(ERL_INCLUDE)

$(NIF): $(NIF_OBJECTS) $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) -shared -o $@ $(NIF_OBJECTS) $(LDFLAGS) -L$(PRIV) -lflash_attention -Wl,-rpath,'$$ORIGIN'

.PHONY: clean
clean:
	rm -rf $(BUILD) $(PRIV) _build

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
