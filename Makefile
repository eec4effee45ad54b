# FlashAttention: libflash_attention.so, its Erlang NIF and the Elixir API.
#
#   make              build everything that can be built here
#   make demo         build, train a small language model for under a minute, show what it writes
#   make test         build, then every check and test that can run here
#   make bench        speed and memory on this machine, side by side with others; make bench-gpu on its GPU,
#                     make bench-xla there in XLA's programs; make bench-responsiveness the VM's schedulers
#   make install      library, header and pkg-config file below PREFIX, for C programs
#
#   make test-sanitize   the tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   make test-isas       the tests that choose the CPU's best instruction set, with that one and the next switched off
#   make test-xla        the XLA custom calls in XLA itself: JAX's, which PYTHON must have
#   make test-emulated   the CUDA backend on an emulated GPU (`make test` includes it)
#   make test-cuda-sanitize   the tests of the GPU under compute-sanitizer (`make test` includes it)
#   make check-deps      one-way dependencies between the layers
#   make check-format    sources are in the house style; `make format` rewrites them
#   make clean
#
# `make demo` and `make test` install what is missing on Debian and Ubuntu when they may, and say so first.
#
# Variables: CC, CFLAGS, LDFLAGS, NVCC, NVCCFLAGS, PREFIX, DESTDIR as usual, and
#   FA_CUDA=0        leave the CUDA kernels out; they are built in where nvcc is
#   XLA_FFI_INCLUDE  where XLA's header xla/ffi/api/c_api.h is, for the XLA custom calls; EXLA and PYTHON's
#                    jaxlib bring it along and are looked into. Without it the calls are left out
#   PYTHON           what has JAX, for that and for the tests of the custom calls
#   FA_INSTALL=0     install nothing, say what is missing
#   WERROR=1         warnings are errors, in C and in Elixir
#   SANITIZE=...     build with -fsanitize=...; give it its own BUILD and PRIV
#   BUILD, PRIV      where everything is built (build), and where the finished libraries go (priv)
#   V=1              show whole commands
#
# Paths may have spaces, but for BUILD, which is a part of the names of make's targets.

MAKEFLAGS += --no-builtin-rules

CC      ?= cc
CFLAGS  ?= -O2 -g
NVCC    ?= nvcc
PYTHON  ?= python3
PREFIX  ?= /usr/local
BUILD   ?= build
PRIV    ?= $(if $(MIX_APP_PATH),$(MIX_APP_PATH)/priv,priv)

ifneq ($(words $(BUILD)),1)
$(error BUILD: expected a path without spaces, got '$(BUILD)')
endif

LIBRARY := $(BUILD)/libflash_attention.so
NIF     := $(BUILD)/flash_attention_nif.so

# $(call quote,text) is one word to the shell.
quote = '$(subst ','\'',$(1))'

# Elixir prints Unicode only where the locale says that it may.
ifeq ($(LC_ALL)$(LC_CTYPE)$(LANG),)
export LC_ALL := C.UTF-8
endif

# Mix calls make to build below MIX_APP_PATH, as elixir_make would; make calls Mix everywhere else. MAKEFLAGS
# is unset for it because a job server does not reach through the VM, PRIV because Mix knows its own.
MIX := env -u MAKEFLAGS -u PRIV mix
HAS_MIX := $(shell command -v mix)

.PHONY: all native elixir
all: native $(if $(MIX_APP_PATH),,elixir)

# `$(call show,CC x.c)cc ...` is shown as "CC x.c".
show = $(if $(V),,@echo "  $(1)"; )

# ---- flags -----------------------------------------------------------------------------------------

TARGET   := $(shell { $(CC) -dumpmachine; } 2>/dev/null)
WARNINGS := -Wall -Wextra -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla

# Sanitizers report functions and lines, which -g1 has. With -g the kernels take half as long again to compile.
FA_CFLAGS = -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -pthread \
            $(WARNINGS) $(if $(WERROR),-Werror) $(SANITIZE_FLAGS) $(CFLAGS) $(if $(SANITIZE),-g1)
SANITIZE_FLAGS := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=undefined -fno-omit-frame-pointer)

# A library with threads of its own must not be unmapped under them: nodelete.
ifneq ($(findstring darwin,$(TARGET)),)
FA_LDFLAGS = -pthread -undefined dynamic_lookup -Wl,-rpath,@loader_path $(SANITIZE_FLAGS) $(LDFLAGS)
else
FA_LDFLAGS = -pthread -Wl,-z,nodelete -Wl,-rpath,'$$ORIGIN' $(SANITIZE_FLAGS) $(LDFLAGS)
NO_UNDEFINED := $(if $(SANITIZE),,-Wl,-z,defs)
BIND_OWN     := -Wl,-Bsymbolic
endif

# Objects are made again when the compiler or the flags change, not only when a source does.
FLAGS      := $(BUILD)/c.flags
FLAGS_c     = $(CC) $(FA_CFLAGS) $(FA_LDFLAGS) $(FA_CUDA) $(XLA_FFI_INCLUDE)
FLAGS_nif   = $(ERTS_INCLUDE_DIR)
FLAGS_cuda  = $(NVCC) $(CUDA_CFLAGS) $(CUDA_ARCHS) $(CUDA_HOME)

.PHONY: FORCE
FORCE:

# ---- objects of core and CPU -----------------------------------------------------------------------

# The CPU kernels are one source, compiled once for every instruction set and chosen at run time.
KERNELS          := c_src/cpu/kernels.c
ISAS_x86_64      := avx2 avx512 avx512bf16 amx
ISAS             := plain $(ISAS_$(firstword $(subst -, ,$(TARGET))))
ISA_FLAGS_avx2   := -mavx2 -mfma -mf16c
ISA_FLAGS_avx512 := -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512
ISA_FLAGS_avx512bf16 := $(ISA_FLAGS_avx512) -mavx512bf16
ISA_FLAGS_amx    := $(ISA_FLAGS_avx512bf16) -mamx-tile -mamx-bf16

# Under a sanitizer -O3 takes a third longer to compile than -O2, and tests no less time.
KERNELS_LEVEL    := $(if $(SANITIZE),-O2,-O3)

SOURCES := $(filter-out $(KERNELS),$(wildcard c_src/core/*.c c_src/host/*.c c_src/cpu/*.c))
OBJECTS := $(SOURCES:c_src/%.c=$(BUILD)/%.o) $(if $(wildcard $(KERNELS)),$(ISAS:%=$(BUILD)/cpu/kernels_%.o))

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d)

# ---- objects of CUDA, where nvcc is ----------------------------------------------------------------

FA_CUDA ?= $(if $(shell command -v $(NVCC) 2>/dev/null),1,0)

ifeq ($(FA_CUDA),1)
# One binary for every GPU from sm_80 on: code for Ampere and Hopper, and PTX for what came later. The CUDA
# runtime is linked statically, and C++ needs no library of its own, so that it loads where neither is.
CUDA_ARCHS  ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
ifndef CUDA_HOME
CUDA_HOME   := $(shell dirname "$$(dirname "$$(readlink -f "$$(command -v $(NVCC))")")")
endif
# What nvcc 13 compresses best, every driver that runs its programs can read; of those for 12 only the later ones can.
NVCC_RELEASE  := $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
CUDA_COMPRESS := $(if $(filter-out 0 1 2 3 4 5 6 7 8 9 10 11 12,$(NVCC_RELEASE)),--compress-mode=size)
CUDA_CFLAGS := -O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-fno-exceptions,-fno-threadsafe-statics \
               $(CUDA_COMPRESS) $(NVCCFLAGS)
CUDA_LIBS   := -L$(call quote,$(CUDA_HOME)/lib64) -lcudart_static -ldl -lrt -lpthread
CUDA_INCLUDE := $(CUDA_HOME)/include
HOPPER_ARCH := -gencode arch=compute_90a,code=sm_90a
else ifeq ($(FA_CUDA),emulated)
# The same sources for GPUs that the tests emulate on the CPU: make test-emulated.
include test/emulated/objects.mk
endif

ifneq ($(filter 1 emulated,$(FA_CUDA)),)
# The passes are one source each, compiled once for every kind of cuda/kinds.cuh that they serve.
CUDA_KINDS   := bf16 f16 f32 f32_as_f16
KINDS_forward      := $(CUDA_KINDS)
KINDS_backward     := $(CUDA_KINDS)
KINDS_backward_few := bf16 f16
KINDS_decode       := $(CUDA_KINDS)
CUDA_PASSES  := forward backward backward_few decode
CUDA_KERNELS := $(foreach pass,$(CUDA_PASSES),$(KINDS_$(pass):%=$(BUILD)/cuda/$(pass)_%.o))

# Kernels for Hopper alone; those above serve the others, and what these do not take.
HOPPER_KINDS_forward  := $(CUDA_KINDS)
HOPPER_KINDS_backward := bf16 f16
HOPPER_KINDS_backward_wide := bf16 f16
HOPPER_KINDS_backward_scaled := f32 f32_as_f16
HOPPER_KINDS_decode := bf16 f16
HOPPER_PASSES := forward backward backward_wide backward_scaled decode
CUDA_KERNELS  += $(foreach pass,$(HOPPER_PASSES),$(HOPPER_KINDS_$(pass):%=$(BUILD)/cuda/hopper_$(pass)_%.o))

CUDA_HOST     := $(patsubst cuda/%.c,$(BUILD)/cuda/%.o,$(wildcard cuda/*.c))
CUDA_SMALL    := $(patsubst %,$(BUILD)/cuda/%.o,auxiliary copy isolation merge plan sum)
OBJECTS       += $(CUDA_HOST) $(CUDA_SMALL) $(CUDA_KERNELS) $(EMULATOR)
$(BUILD)/core/backends.o: EXTRA_CFLAGS := -DFA_CUDA
endif

# ---- objects of the XLA custom calls, where XLA's header is ----------------------------------------

# EXLA unpacks it where it is built: below deps, or beside this project where both are dependencies.
ifeq ($(origin XLA_FFI_INCLUDE),undefined)
XLA_FFI_INCLUDE := $(shell \
  jaxlib=$$($(PYTHON) -c 'from importlib.util import find_spec; print(find_spec("jaxlib").submodule_search_locations[0])' 2>/dev/null); \
  for place in deps/exla/cache/xla_extension ../exla/cache/xla_extension \
    $(call quote,$(MIX_DEPS_PATH))/exla/cache/xla_extension "$$jaxlib"; do \
    if [ -f "$$place/include/xla/ffi/api/c_api.h" ]; then echo "$$place/include"; break; fi; \
  done)
endif

OBJECTS += $(BUILD)/xla/registry.o
ifneq ($(XLA_FFI_INCLUDE),)
OBJECTS += $(BUILD)/xla/handlers.o $(BUILD)/xla/merge.o
$(BUILD)/xla/%.o: EXTRA_CFLAGS := -DFA_XLA -isystem $(call quote,$(XLA_FFI_INCLUDE))
else
$(BUILD)/xla/registry.o: NOTE := , without the XLA custom calls: xla/ffi/api/c_api.h is not there (XLA_FFI_INCLUDE)
endif

# ---- the library, and the NIF where Erlang's headers are -------------------------------------------

# elixir_make passes ERTS_INCLUDE_DIR too.
ifndef ERTS_INCLUDE_DIR
ERTS_INCLUDE_DIR := $(shell erl -noshell -eval 'io:format("~ts/erts-~ts/include", [code:root_dir(), erlang:system_info(version)]), halt().' 2>/dev/null)
endif
HAS_ERTS    := $(shell test -f $(call quote,$(ERTS_INCLUDE_DIR)/erl_nif.h) && echo yes)
NIF_OBJECTS := $(patsubst c_src/%.c,$(BUILD)/%.o,$(wildcard c_src/nif/*.c))
LIBRARIES   := $(LIBRARY) $(if $(HAS_ERTS),$(NIF))

# One make at a time builds them: Mix's environments share what is built, and an editor may compile beside a shell.
ifndef FA_LOCKED
LOCK := $(if $(shell command -v flock),flock $(BUILD)/lock)

native:
	@mkdir -p $(BUILD)
	$(if $(LOCK),@flock -n $(BUILD)/lock true || echo "  waiting for another make that builds in $(BUILD)")
	+@$(LOCK) $(MAKE) --no-print-directory native FA_LOCKED=1 FA_CUDA=$(FA_CUDA) CUDA_HOME=$(call quote,$(CUDA_HOME)) \
	  XLA_FFI_INCLUDE=$(call quote,$(XLA_FFI_INCLUDE)) ERTS_INCLUDE_DIR=$(call quote,$(ERTS_INCLUDE_DIR))

$(LIBRARY) $(NIF) $(OBJECTS) $(FLAGS): native
	@:
else

# The finished libraries replace those of before as whole files: programs that run keep theirs.
native: $(LIBRARIES)
	@mkdir -p $(call quote,$(PRIV))
	@for library in $(LIBRARIES); do \
	  finished=$(call quote,$(PRIV))/$$(basename $$library); \
	  cmp -s $$library "$$finished" || \
	    { cp $$library "$$finished.new" && mv -f "$$finished.new" "$$finished"; } || exit 1; \
	done

$(BUILD)/%.flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' $(call quote,$(FLAGS_$*)) | cmp -s - $@ || printf '%s\n' $(call quote,$(FLAGS_$*)) > $@

$(BUILD)/%.o: c_src/%.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(call show,CC $<$(NOTE))$(CC) $(FA_CFLAGS) $(EXTRA_CFLAGS) -MMD -MP -c -o $@ $<

# What tests hold everything else against, which takes most of their time.
$(BUILD)/cpu/reference.o: EXTRA_CFLAGS := -O3

$(ISAS:%=$(BUILD)/cpu/kernels_%.o): $(BUILD)/cpu/kernels_%.o: $(KERNELS) $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(call show,CC $< for $*)$(CC) $(FA_CFLAGS) $(KERNELS_LEVEL) -ffp-contract=fast $(ISA_FLAGS_$*) -DFA_ISA=$* -DFA_ISA_$* -MMD -MP -c -o $@ $<

$(CUDA_HOST): $(BUILD)/cuda/%.o: cuda/%.c $(FLAGS) $(BUILD)/cuda.flags Makefile
	@mkdir -p $(@D)
	$(call show,CC $<)$(CC) $(FA_CFLAGS) -I$(call quote,$(CUDA_INCLUDE)) -MMD -MP -c -o $@ $<

$(CUDA_SMALL): $(BUILD)/cuda/%.o: cuda/%.cu $(BUILD)/cuda.flags Makefile
	@mkdir -p $(@D)
	$(call show,NVCC $<)$(NVCC) $(CUDA_CFLAGS) $(CUDA_ARCHS) -MMD -MP -c -o $@ $<

# $(1): pass, $(2): kinds, $(3): architectures. Where ptxas makes products of a warpgroup wait for each other a kernel
# takes up to 20 times as long, of which it only informs: with WERROR that is an error, too.
define CUDA_PASS
$(2:%=$$(BUILD)/cuda/$(1)_%.o): $$(BUILD)/cuda/$(1)_%.o: cuda/$(1).cu $$(BUILD)/cuda.flags Makefile
	@mkdir -p $$(@D)
	$$(call show,NVCC $$< for $$*)$$(NVCC) $$(CUDA_CFLAGS) $(3) -DFA_KIND=$$* -MMD -MP -c -o $$@ $$< 2>$$@.log || { cat $$@.log >&2; false; }
	@cat $$@.log >&2
	@! grep -q 'are serialized' $$@.log || test -z "$$(WERROR)" || { rm -f $$@; false; }
endef
$(foreach pass,$(CUDA_PASSES),$(eval $(call CUDA_PASS,$(pass),$(KINDS_$(pass)),$(CUDA_ARCHS))))
$(foreach pass,$(HOPPER_PASSES),$(eval $(call CUDA_PASS,hopper_$(pass),$(HOPPER_KINDS_$(pass)),$(HOPPER_ARCH))))

$(LIBRARY): $(OBJECTS)
	$(call show,LD $@)$(CC) -shared -o $@ $(OBJECTS) $(FA_LDFLAGS) $(NO_UNDEFINED) $(CUDA_LIBS) -lm

$(NIF_OBJECTS): $(BUILD)/nif.flags
$(NIF_OBJECTS): EXTRA_CFLAGS := -I$(call quote,$(ERTS_INCLUDE_DIR))

# The NIF holds the library's objects and calls those (-Bsymbolic). Were it linked to the library, new code that is
# loaded into a running VM would call the old library, whose name the loader knows already.
$(NIF): $(NIF_OBJECTS) $(OBJECTS)
	$(call show,LD $@)$(CC) -shared -o $@ $^ $(FA_LDFLAGS) $(BIND_OWN) $(CUDA_LIBS) -lm
endif

# Where Hex is installed, mix.exs names packages, and Mix compiles only where they are there.
define get_packages
@$(MIX) deps.loadpaths --no-compile >/dev/null 2>&1 || \
if [ "$(FA_INSTALL)" != 0 ]; then \
  echo "make $@ fetches the packages that mix.exs names, with mix deps.get (FA_INSTALL=0 to forbid that)"; \
  $(MIX) deps.get; \
else \
  echo "make $@ needs the packages that mix.exs names. To fetch them: mix deps.get" >&2; \
  exit 1; \
fi
endef

elixir: native
ifeq ($(HAS_MIX),)
	@echo "Elixir is not installed: built the C library only"
else
	$(get_packages)
	$(MIX) compile $(if $(WERROR),--warnings-as-errors)
endif

# ---- demo and test ---------------------------------------------------------------------------------

# What each needs that is not there, as Debian and Ubuntu name it. The compiler is asked to link a program
# that uses its C library: an installed compiler may lack that.
COMPILES = $(shell { echo 'int main(void) { return 0; }' | $(CC) -include stdlib.h -x c - -o /dev/null; } 2>&1 && echo yes || true)
NEEDED   = $(if $(filter yes,$(COMPILES)),,$(if $(findstring clang,$(CC)),clang,gcc) libc6-dev) \
            $(if $(HAS_MIX),,elixir) $(if $(HAS_ERTS),,erlang-dev)

# Installs what is NEEDED where that is possible without a password, and says so first.
define install_missing
@set -e; missing='$(strip $(NEEDED))'; \
if [ -n "$$missing" ]; then \
  as_root=$$([ "$$(id -u)" = 0 ] || echo 'sudo -n'); \
  if [ "$(FA_INSTALL)" != 0 ] && command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
    echo "make $@ needs what is not installed here: $$missing"; \
    echo "Installing it with apt-get (FA_INSTALL=0 to forbid that)"; \
    $$as_root apt-get update -q && \
    $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; \
  else \
    echo "make $@ needs what is not installed here. On Debian and Ubuntu:" >&2; \
    echo "    apt-get install $$missing" >&2; \
    exit 1; \
  fi; \
fi
endef

# The second make sees what was installed.
.PHONY: demo test run-demo run-tests
demo test:
	$(install_missing)
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell getconf _NPROCESSORS_ONLN)) run-$(@:test=tests)

run-demo: all
	$(MIX) flash_attention.train

run-tests:
	$(MAKE) check-format
	$(MAKE) all
	$(MAKE) --output-sync check-deps test-c test-emulated test-truth test-check
	$(MAKE) test-elixir

.PHONY: test-check test-elixir test-isas test-check-isas test-sanitize
test-check: elixir
	$(MIX) flash_attention.check

test-elixir: elixir
	$(MIX) test $(if $(WERROR),--warnings-as-errors)

test-isas: test-c-isas test-check-isas
test-check-isas: elixir
	for isas in amx amx,avx512bf16 avx512 avx512,avx2; do FLASH_ATTENTION_DISABLE=$$isas $(MIX) flash_attention.check || exit 1; done

# The NIF in the VM under the sanitizers, in a copy of the tree, so that priv is its own; what test-c-addresses has
# built serves it, too. +Mea min hands the VM's allocations on to malloc, where AddressSanitizer sees them. What times
# calls or counts memory stays out.
SANITIZED := $(BUILD)/sanitized
SANITIZED_ENVIRONMENT = BUILD=../sanitize FA_CUDA=0 SANITIZE=address,undefined \
                        XLA_FFI_INCLUDE=$(call quote,$(XLA_FFI_INCLUDE))
test-sanitize: test-c-sanitize test-nif-sanitize
.PHONY: test-nif-sanitize
test-nif-sanitize: test-c-addresses
	@mkdir -p $(SANITIZED)
	rm -rf $(SANITIZED)/c_src $(SANITIZED)/lib $(SANITIZED)/test
	cp -Rp $(filter-out build priv deps tmp,$(wildcard *)) .formatter.exs $(SANITIZED)/
	$(MAKE) -C $(SANITIZED) native PRIV=priv $(SANITIZED_ENVIRONMENT)
	cd $(SANITIZED) && env -u MAKEFLAGS $(SANITIZED_ENVIRONMENT) ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ERL_FLAGS='+Mea min' \
	  mix test test/flash_attention_test.exs test/flash_attention/native_test.exs

-include test/c/tests.mk test/emulated/tests.mk test/truth/tests.mk test/xla/tests.mk bench/bench.mk

# ---- style -----------------------------------------------------------------------------------------

C_FILES := $(wildcard c_src/*.h examples/*.c examples/truth/*.cu examples/truth/*.cpp examples/truth/*.h test/truth/*.cpp test/emulated/*.cpp test/emulated/include/*.h c_src/*/*.[ch] cuda/*.cu cuda/*.cuh cuda/*.[ch] test/*/*.[ch] bench/*.[ch])

# clang-format's taste changes from version to version; Debian 12's is the house's.
CLANG_FORMAT ?= clang-format
CLANG_FORMAT_VERSION := 14

.PHONY: format check-format check-deps
format:
	$(CLANG_FORMAT) -i $(C_FILES)
	$(MIX) format

check-format:
	@case "$$($(CLANG_FORMAT) --version 2>/dev/null)" in \
	  *" $(CLANG_FORMAT_VERSION)."*) $(CLANG_FORMAT) --dry-run --Werror $(C_FILES) ;; \
	  *) echo "check-format: C skipped, clang-format $(CLANG_FORMAT_VERSION) is not installed" ;; \
	esac
	$(MIX) format --check-formatted

check-deps: native
	@elixir -r test/build/dependencies.exs -e 'Dependencies.main([".", "$(BUILD)"])'

# ---- install, clean --------------------------------------------------------------------------------

VERSION = $(shell sed -n 's/.*FA_VERSION "\(.*\)"/\1/p' c_src/flash_attention.h)

.PHONY: install clean help
install: INSTALLED := $(DESTDIR)$(PREFIX)
install: $(LIBRARY)
	@printf '%s\n' 'Name: flash_attention' 'Description: Exact attention, forward and backward' 'Version: $(VERSION)' \
	  $(call quote,Cflags: -I"$(PREFIX)/include") $(call quote,Libs: -L"$(PREFIX)/lib" -lflash_attention) > $(BUILD)/flash_attention.pc
	install -d $(call quote,$(INSTALLED)/include) $(call quote,$(INSTALLED)/lib/pkgconfig)
	install -m 644 c_src/flash_attention.h c_src/flash_attention_truth.h $(call quote,$(INSTALLED)/include/)
	install -m 755 $(LIBRARY) $(call quote,$(INSTALLED)/lib/)
	install -m 644 $(BUILD)/flash_attention.pc $(call quote,$(INSTALLED)/lib/pkgconfig/)

clean:
	rm -rf $(BUILD) $(call quote,$(PRIV)) _build tmp

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
