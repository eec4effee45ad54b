# Benchmarks. `make bench` prints a page of Markdown and keeps it in RESULT.
RESULT ?= bench/results/cpu.md

OPENBLAS := $(shell printf '\043include <cblas.h>\nint main(void){return 0;}' | $(CC) -x c - -o /dev/null -lopenblas 2>/dev/null && echo 1)

$(BUILD)/bench_cpu: bench/cpu.c $(LIBRARY)
	$(CC) $(FA_CFLAGS) -O3 -ffp-contract=fast -fopenmp $(if $(OPENBLAS),-DHAVE_OPENBLAS) -o $@ $< $(FA_LDFLAGS) \
	  -L$(BUILD) -lflash_attention $(if $(OPENBLAS),-lopenblas) -lm

# Plain attention has two pools of threads, OpenMP's and OpenBLAS's: neither may spin while the other works.
QUIET_THREADS := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 OPENBLAS_THREAD_TIMEOUT=4

.PHONY: bench
bench: $(BUILD)/bench_cpu
	$(if $(OPENBLAS),,@echo "OpenBLAS (libopenblas-dev) is missing: no plain attention to compare with")
	@mkdir -p $(dir $(RESULT))
	{ $(QUIET_THREADS) $(BUILD)/bench_cpu $(BENCH_ARGS); \
	  if $(PYTHON) -c 'import torch' 2>/dev/null; then echo; $(PYTHON) bench/cpu_torch.py --library $(LIBRARY); \
	  else echo; echo "PyTorch is not installed here: nothing to say of its attention."; fi; } | tee $(RESULT)

# On the GPU, beside torch's kernels, in a page and a picture named after it. BENCH_ARGS: see bench/gpu.py.
.PHONY: bench-gpu
bench-gpu: $(LIBRARY)
	python3 bench/gpu.py --library $(LIBRARY) $(BENCH_ARGS)

# Masks, beside torch's varlen_attn and flex_attention.
.PHONY: bench-masks
bench-masks: $(LIBRARY)
	python3 bench/masks.py --library $(LIBRARY) $(BENCH_ARGS)

# A bias and the gradient by it, masks of single scores, ALiBi and dropout, beside torch's kernels.
.PHONY: bench-scores
bench-scores: $(LIBRARY)
	python3 bench/scores.py --library $(LIBRARY) $(BENCH_ARGS)

# Unusual shapes, beside the fastest of torch's kernels. BENCH_ARGS: see bench/corners.py.
.PHONY: bench-corners
bench-corners: $(LIBRARY)
	python3 bench/corners.py --library $(LIBRARY) $(BENCH_ARGS)

# Decoding from Elixir with a cache: one step, and 32 layers; on the CPU, or with BENCH_ARGS=cuda on a GPU.
.PHONY: bench-decode
bench-decode: RESULT := bench/results/cpu_decode.md
bench-decode: elixir
	$(MIX) run bench/decode.exs $(BENCH_ARGS) | tee $(RESULT)

# A few rows of q beside long caches on the GPU, beside torch's kernels. BENCH_ARGS: see bench/decode.py.
.PHONY: bench-decode-gpu
bench-decode-gpu: $(LIBRARY)
	python3 bench/decode.py --library $(LIBRARY) $(BENCH_ARGS)

# The same kernels in XLA's programs, beside XLA's plain attention.
.PHONY: bench-xla
bench-xla: $(LIBRARY)
	$(PYTHON) bench/xla.py --library $(LIBRARY) $(BENCH_ARGS)

# Normal schedulers of the VM beside calls that keep every processor busy. BENCH_ARGS: the number of calls, 200.
.PHONY: bench-responsiveness
bench-responsiveness: RESULT := bench/results/responsiveness.md
bench-responsiveness: elixir
	$(MIX) run bench/responsiveness.exs $(BENCH_ARGS) | tee $(RESULT)

# Merges of parts beside the memory's bandwidth. BENCH_ARGS: cuda 4800
$(BUILD)/bench_merge: bench/merge.c $(LIBRARY)
	$(CC) $(FA_CFLAGS) -o $@ $< $(FA_LDFLAGS) -L$(BUILD) -lflash_attention

.PHONY: bench-merge
bench-merge: $(BUILD)/bench_merge
	$< $(BENCH_ARGS)

# Attention over several GPUs by NCCL (libnccl.so.2 where the loader finds it), beside one of them, torch's ring and Ulysses,
# and JAX with shard_map. BENCH_ARGS: see bench/distributed.exs; PEER_ARGS: bench/distributed_peers.py.
.PHONY: bench-distributed
bench-distributed: RESULT := bench/results/h200_distributed.md
bench-distributed: elixir
	{ NCCL_NVLS_ENABLE=0 $(MIX) run bench/distributed.exs $(BENCH_ARGS); \
	  NCCL_NVLS_ENABLE=0 $(PYTHON) bench/distributed_peers.py --library $(LIBRARY) $(PEER_ARGS); } | tee $(RESULT)

# Bumblebee's models, swapped and not: whose numbers differ by how much. With Nx, Axon and Bumblebee on ERL_LIBS.
.PHONY: bench-bumblebee
bench-bumblebee: RESULT := bench/results/bumblebee.md
bench-bumblebee: elixir
	MIX_ENV=test $(MIX) run bench/bumblebee.exs | tee $(RESULT)

# What ranks cost on this machine's processors. BENCH_ARGS: see bench/ranks.exs.
.PHONY: bench-ranks
bench-ranks: RESULT := bench/results/cpu_ranks.md
bench-ranks: elixir
	$(MIX) run bench/ranks.exs $(BENCH_ARGS) | tee $(RESULT)

# What that would be on more GPUs than there are: a model, computed from the deals as they are.
.PHONY: bench-plan
bench-plan: RESULT := bench/results/plan.md
bench-plan: elixir
	$(MIX) run bench/plan.exs | tee $(RESULT)

# A training step written without this library, and rewritten, in JAX's XLA. The programs are made where Nx and EXLA's Elixir half
# are, and can be carried from there in PROGRAMS. BENCH_ARGS: see bench/rewriter.py.
PROGRAMS ?= $(BUILD)/rewriter

.PHONY: bench-rewriter-programs bench-rewriter
bench-rewriter-programs: elixir
	$(MIX) run bench/rewriter.exs $(PROGRAMS)

bench-rewriter: $(LIBRARY)
	$(PYTHON) bench/rewriter.py $(PROGRAMS) --library $(LIBRARY) $(BENCH_ARGS)

# How long rewriting takes itself.
.PHONY: bench-rewriter-cost
bench-rewriter-cost: RESULT := bench/results/rewriter.md
bench-rewriter-cost: elixir
	$(MIX) run bench/rewriter_cost.exs | tee $(RESULT)
