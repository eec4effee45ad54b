// Fibers, and who runs next. Blocks that are on a multiprocessor have a thread of the system each, so that
// __shared__ can be thread_local; the thread that holds the baton runs, and no other.
#include "threads.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

Thread *current;
Launch launch;
bool (*when_idle)(Block &);
void (*when_block_begins)(Block &), (*when_block_ended)(Block &);

namespace {

constexpr size_t PAGE = 4096, MOST_SHARED = 256 << 10;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK = 512 << 10;
#else
constexpr size_t STACK = 128 << 10;
#endif
constexpr int MOST_SLOTS = 64;

// ---- the device ----------------------------------------------------------------------------------------

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

Device read_device() {
  Device d;
  const long sm = setting("EMULATED_SM", 80);
  d.major = int(sm / 10), d.minor = int(sm % 10);
  d.num_multiprocessors = int(setting("EMULATED_MULTIPROCESSORS", 3));
  d.blocks_a_multiprocessor = int(setting("EMULATED_BLOCKS", 1));
  d.num_devices = int(setting("EMULATED_DEVICES", 1));
  d.shared_bytes = size_t(setting("EMULATED_SHARED_KIB", d.major >= 9 ? 227 : 163)) << 10;
  d.seed = unsigned(setting("EMULATED_SEED", 1));
  return d;
}

// ---- a block's place, and the baton --------------------------------------------------------------------

struct Slot {
  Block block;
  Thread threads[MOST_THREADS];
  uint8_t *stacks[MOST_THREADS];
  uint8_t *shared_end;  // of its memory; behind it nothing may be touched
  uint8_t *static_shared;
  size_t static_bytes;
  void *main_pointer;  // of the stack of the system's thread
  int number, group, rank;
  uint64_t num_clusters;  // that have been here
  // Of a group's first slot: threads that have come to the barrier of any of its clusters. Blocks begin when
  // the cluster before them is not all gone, so that no block of either can count them.
  uint64_t cluster_arrived;
  bool is_active;
  pthread_t thread;
  pthread_cond_t turn;
};

Slot *slots[MOST_SLOTS];
int num_slots, num_active, runner = -1;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
unsigned random_state = 1;
uint64_t progress, progress_seen;
int num_idle;

struct {
  const void *kernel;
  Invoke invoke;
  void **arguments;
  uint64_t num_blocks, next_block;
  int cluster, num_groups;  // blocks of a cluster; groups of slots that hold one
} job;

Slot *slot_of(const Block &block) {
  return reinterpret_cast<Slot *>(const_cast<Block *>(&block));  // its first member
}

unsigned draw() {
  random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
  return random_state;
}

// Lets another block's thread run, if there is one, until the baton comes back.
void pass_baton(Slot *from) {
  int to = from->number;
  do to = (to + 1) % num_slots;
  while (!slots[to]->is_active && to != from->number);
  if (to == from->number) return;
  Thread *own = current;
  pthread_mutex_lock(&mutex);
  runner = to;
  pthread_cond_signal(&slots[to]->turn);
  if (from->is_active) {
    while (runner != from->number) pthread_cond_wait(&from->turn, &mutex);
    current = own;
  }
  pthread_mutex_unlock(&mutex);
}

// ---- switching between fibers --------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void emulated_switch(void **from, void *to);
asm(R"(
.text
.p2align 4
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, .-emulated_switch
)");

void prepare(Thread &thread, uint8_t *stack, void (*entry)()) {
  // Beginnings are spread, or the same variable of all threads would have one place in the cache.
  void **top = reinterpret_cast<void **>(stack + STACK - 64 - thread.number % 32 * 192);
  *--top = nullptr;  // where entry would return to
  *--top = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  thread.stack_pointer = top;
}
#else
ucontext_t *context_of(void *&pointer) {
  if (!pointer) pointer = calloc(1, sizeof(ucontext_t));
  return static_cast<ucontext_t *>(pointer);
}
void emulated_switch(void **from, void *to) { swapcontext(context_of(*from), static_cast<ucontext_t *>(to)); }
void prepare(Thread &thread, uint8_t *stack, void (*entry)()) {
  ucontext_t *context = context_of(thread.stack_pointer);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = STACK;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}
#endif

int lowest(uint32_t mask) { return __builtin_ctz(mask); }
int highest(uint32_t mask) { return 31 - __builtin_clz(mask); }

// A thread that can run: of this warp, or else of another one, drawn by lot. Lanes of every other block run
// backwards.
Thread *next_ready(Block &block, Warp *warp) {
  if (!warp || !warp->ready) {
    warp = nullptr;
    const int first = int(draw() % unsigned(block.num_warps));
    for (int i = 0; i < block.num_warps && !warp; i++) {
      Warp &other = block.warps[(first + i) % block.num_warps];
      if (other.ready) warp = &other;
    }
  }
  if (!warp) return nullptr;
  const int lane = (block.index.x ^ launch.number) & 1 ? highest(warp->ready) : lowest(warp->ready);
  return block.threads + warp->number * WARP + lane;
}

// The running thread has lost its place among those that can run, or keeps it.
void switch_away() {
  Thread *from = current;
  Block &block = *from->block;
  Thread *to = next_ready(block, from->warp);
  if (to == from) return;
  current = to;
  emulated_switch(&from->stack_pointer, to ? to->stack_pointer : slot_of(block)->main_pointer);
}

void wait(const char *what, long detail, Site site) {
  Thread &thread = *current;
  thread.what = what, thread.detail = detail, thread.site = site;
  thread.warp->ready &= ~(1u << thread.lane());
  switch_away();
}

// ---- reports -------------------------------------------------------------------------------------------

bool waits_alike(const Thread &a, const Thread &b) {
  return a.has_ended == b.has_ended && a.what == b.what && a.detail == b.detail && a.site.line == b.site.line;
}

void print_warp(const Block &block, const Warp &warp) {
  uint32_t left = warp.there;
  while (left) {
    const Thread &first = block.threads[warp.number * WARP + lowest(left)];
    uint32_t alike = 0;
    for (int lane = 0; lane < WARP; lane++)
      if (left >> lane & 1 && waits_alike(first, block.threads[warp.number * WARP + lane])) alike |= 1u << lane;
    left &= ~alike;
    fprintf(stderr, "    warp %d, lanes %08x: ", warp.number, alike);
    if (first.has_ended) {
      fprintf(stderr, "ended\n");
      continue;
    }
    fprintf(stderr, "%s", first.what ? first.what : "runs");
    if (first.detail >= 0) fprintf(stderr, " %ld", first.detail);
    fprintf(stderr, " at %s:%d\n", first.site.file, first.site.line);
  }
}

void print_block(const Block &block) {
  fprintf(stderr, "  block (%u, %u, %u):\n", block.index.x, block.index.y, block.index.z);
  for (int w = 0; w < block.num_warps; w++) print_warp(block, block.warps[w]);
  for (int i = 0; i < NUM_BARRIERS; i++)
    if (block.barriers[i].arrived > 0)
      fprintf(stderr, "    barrier %d: %d of %d threads have arrived\n", i, block.barriers[i].arrived,
              block.barriers[i].awaited ? block.barriers[i].awaited : block.num_left);
}

void print_launch() {
  fprintf(stderr, "emulated GPU: launch %ld, %u x %u blocks of %u threads, of the kernel at\n", launch.number,
          launch.grid.x, launch.grid.y, launch.block.x);
  fflush(stderr);
  backtrace_symbols_fd(const_cast<void **>(&job.kernel), 1, 2);
  if (current)
    fprintf(stderr, "  block (%u, %u, %u), thread %d (warp %d, lane %d)\n", current->block->index.x,
            current->block->index.y, current->block->index.z, current->number, current->number / WARP,
            current->lane());
}

[[noreturn]] void end_process() {
  void *frames[64];
  fflush(stderr);
  if (current) backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
  _exit(70);
}

[[noreturn]] void report_deadlock() {
  current = nullptr;
  print_launch();
  fprintf(stderr, "  deadlock: every thread waits\n");
  for (int i = 0; i < num_slots; i++)
    if (slots[i]->is_active) print_block(slots[i]->block);
  end_process();
}

void report_fault(int, siginfo_t *info, void *) {
  print_launch();
  fprintf(stderr, "  the address %p is not there: out of bounds, or a stack that is too small\n",
          info->si_addr);
  end_process();
}

void catch_faults() {
#ifndef __SANITIZE_ADDRESS__
  stack_t stack = {};
  stack.ss_size = 64 << 10;
  stack.ss_sp = malloc(stack.ss_size);
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
#endif
}

// ---- blocks --------------------------------------------------------------------------------------------

void release_barrier(Block &block, Barrier &barrier) {
  for (int w = 0; w < block.num_warps; w++) block.warps[w].ready |= barrier.waiting[w], barrier.waiting[w] = 0;
  barrier.arrived = barrier.awaited = 0;
}

bool is_complete(const Block &block, const Barrier &barrier) {
  return barrier.arrived > 0 && barrier.arrived == (barrier.awaited ? barrier.awaited : block.num_left);
}

void live() {
  job.invoke(job.kernel, job.arguments);
  Thread &thread = *current;
  Block &block = *thread.block;
  progress++;
  thread.has_ended = true;
  thread.warp->ready &= ~(1u << thread.lane());
  block.num_left--;
  if (block.barriers[0].awaited == 0 && is_complete(block, block.barriers[0]))
    release_barrier(block, block.barriers[0]);
  switch_away();
  abort();
}

void *map_with_guards(size_t bytes) {
  uint8_t *memory = static_cast<uint8_t *>(
      mmap(nullptr, bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory + PAGE, bytes, PROT_READ | PROT_WRITE)) {
    perror("emulated GPU: mmap");
    abort();
  }
  return memory + PAGE;
}

// What nobody has written is NaN, and a large number.
void poison(void *memory, size_t bytes) { memset(memory, 0xff, bytes); }

uint3 place(uint64_t number, const uint3 &size) {
  return {unsigned(number % size.x), unsigned(number / size.x % size.y), unsigned(number / size.x / size.y)};
}

void begin_block(Slot &slot, uint64_t number) {
  Block &block = slot.block;
  uint8_t *const memory = slot.shared_end - MOST_SHARED;
  memset(&block, 0, sizeof block);
  block.index = place(number, launch.grid);
  block.num_threads = block.num_left = int(launch.block.x * launch.block.y * launch.block.z);
  block.num_warps = (block.num_threads + WARP - 1) / WARP;
  block.num_in_cluster = unsigned(job.cluster), block.cluster_rank = unsigned(slot.rank);
  block.shared_bytes = uint32_t(launch.shared_bytes);
  block.shared = slot.shared_end - (launch.shared_bytes + 1023) / 1024 * 1024;
  block.threads = slot.threads;
  for (int i = 0; i < job.cluster; i++) block.cluster[i] = &slots[slot.group * job.cluster + i]->block;
  poison(memory, MOST_SHARED);
  poison(slot.static_shared, slot.static_bytes);
  for (int i = 0; i < block.num_threads; i++) {
    Thread &thread = slot.threads[i];
    PendingCopy *const copies = thread.copies;
    const int most = thread.most_copies;
    if (!slot.stacks[i]) slot.stacks[i] = static_cast<uint8_t *>(map_with_guards(STACK));
#if defined(__x86_64__)
    thread = {};
#else
    void *const context = thread.stack_pointer;
    thread = {};
    thread.stack_pointer = context;
#endif
    thread.copies = copies, thread.most_copies = most;
    thread.index = place(uint64_t(i), launch.block);
    thread.number = i;
    thread.block = &block;
    thread.warp = &block.warps[i / WARP];
    thread.detail = -1;
    thread.warp->there |= 1u << thread.lane();
    prepare(thread, slot.stacks[i], live);
  }
  for (int w = 0; w < block.num_warps; w++)
    block.warps[w].number = w, block.warps[w].ready = block.warps[w].there;
  if (when_block_begins) when_block_begins(block);
}

void end_block(Slot &slot) {
  Block &block = slot.block;
  for (uint8_t *byte = block.shared + block.shared_bytes; byte < slot.shared_end; byte++)
    if (*byte != 0xff) fail(Site(), "block %u wrote behind its shared memory", block.index.x);
  for (int i = 1; i < NUM_BARRIERS; i++)
    if (block.barriers[i].arrived > 0 && block.barriers[i].awaited == 0)
      fail(Site(), "block %u ended while threads were at barrier %d", block.index.x, i);
  if (when_block_ended) when_block_ended(block);
}

// Everybody waits: those that look again and again may do so again, when other blocks have run.
void stand_idle(Slot &slot) {
  Block &block = slot.block;
  if (when_idle && when_idle(block)) {
    progress++;
    return;
  }
  if (progress != progress_seen)
    progress_seen = progress, num_idle = 0;
  else if (++num_idle > 2 * num_active + 2)
    report_deadlock();
  pass_baton(&slot);
  for (int w = 0; w < block.num_warps; w++)
    block.warps[w].ready |= block.warps[w].polling, block.warps[w].polling = 0;
}

void run_block(Slot &slot, uint64_t number) {
  begin_block(slot, number);
  progress++;
  while (slot.block.num_left > 0) {
    Thread *thread = next_ready(slot.block, nullptr);
    if (!thread) {
      stand_idle(slot);
      continue;
    }
    current = thread;
    emulated_switch(&slot.main_pointer, thread->stack_pointer);
    current = nullptr;
  }
  end_block(slot);
}

// The static shared memory of the thread that asks: the thread_local variables of the kernel's module.
int find_static_shared(dl_phdr_info *info, size_t, void *data) {
  Slot &slot = *static_cast<Slot *>(data);
  const uintptr_t kernel = reinterpret_cast<uintptr_t>(job.kernel);
  const ElfW(Phdr) *tls = nullptr;
  bool is_here = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) &header = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_TLS) tls = &header;
    if (header.p_type == PT_LOAD && kernel >= begin && kernel < begin + header.p_memsz) is_here = true;
  }
  if (!is_here || !tls || !info->dlpi_tls_data) return 0;
  slot.static_shared = static_cast<uint8_t *>(info->dlpi_tls_data);
  slot.static_bytes = tls->p_memsz;
  return 1;
}

void *run_slot(void *data) {
  Slot &slot = *static_cast<Slot *>(data);
  catch_faults();
  slot.static_shared = nullptr, slot.static_bytes = 0;
  dl_iterate_phdr(find_static_shared, &slot);
  pthread_mutex_lock(&mutex);
  while (runner != slot.number) pthread_cond_wait(&slot.turn, &mutex);
  pthread_mutex_unlock(&mutex);
  const uint64_t num_clusters = job.num_blocks / uint64_t(job.cluster);
  for (;;) {
    // Whoever is free takes the next block; the clusters of a group of slots are known beforehand, so that the
    // blocks of one meet.
    const uint64_t cluster = job.cluster == 1
                                 ? job.next_block++
                                 : uint64_t(slot.group) + uint64_t(job.num_groups) * slot.num_clusters++;
    if (cluster >= num_clusters) break;
    run_block(slot, cluster * uint64_t(job.cluster) + uint64_t(slot.rank));
  }
  slot.is_active = false;
  num_active--;
  progress++;
  pass_baton(&slot);
  return nullptr;
}

// ---- the registry of kernels ---------------------------------------------------------------------------

struct {
  const void *kernel;
  Invoke invoke;
} registry[4096];
int num_kernels;

Invoke invoke_of(const void *kernel) {
  for (int i = 0; i < num_kernels; i++)
    if (registry[i].kernel == kernel) return registry[i].invoke;
  fail(Site(), "%p is no kernel", kernel);
}

}  // namespace

const Device &device() {
  static const Device device = read_device();
  return device;
}

void count_progress() { progress++; }

void fail(Site site, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print_launch();
  fprintf(stderr, "  %s:%d: ", site.file, site.line);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  end_process();
}

// ---- waiting -------------------------------------------------------------------------------------------

void yield(const char *what, long detail, Site site) {
  current->warp->polling |= 1u << current->lane();
  wait(what, detail, site);
}

void sleep(const void *key, const char *what, long detail, Site site) {
  progress++;
  current->key = key;
  wait(what, detail, site);
}

void wake(const void *key) {
  Block &block = *current->block;
  for (int i = 0; i < block.num_threads; i++) {
    Thread &thread = block.threads[i];
    if (thread.key != key) continue;
    thread.key = nullptr;
    thread.warp->ready |= 1u << thread.lane();
  }
}

// ---- meetings ------------------------------------------------------------------------------------------

bool arrive_in_warp(uint32_t mask, const char *what, Site site) {
  Thread &thread = *current;
  Warp &warp = *thread.warp;
  const uint32_t own = 1u << thread.lane();
  progress++;
  if (!(mask & own)) fail(site, "%s: the mask %08x does not name lane %d", what, mask, thread.lane());
  int i = 0;
  while (i < warp.num_meetings && !(warp.meetings[i].mask & mask)) i++;
  if (i == warp.num_meetings) warp.meetings[warp.num_meetings++] = {mask, 0, what};
  Meeting &meeting = warp.meetings[i];
  if (meeting.mask != mask || meeting.what != what)
    fail(site, "%s of lanes %08x while lanes %08x of the warp are at a %s", what, mask, meeting.mask,
         meeting.what);
  meeting.arrived |= own;
  if (meeting.arrived == mask) {
    warp.meetings[i] = warp.meetings[--warp.num_meetings];
    return true;
  }
  wait(what, -1, site);
  return false;
}

void release_warp(uint32_t mask) { current->warp->ready |= mask; }

bool arrive_in_warpgroup(const char *what, Site site) {
  Block &block = *current->block;
  const int group = current->number / 128;
  progress++;
  if (block.warpgroup_arrived[group] > 0 && block.warpgroup_what[group] != what)
    fail(site, "%s while threads of the warpgroup are at a %s", what, block.warpgroup_what[group]);
  block.warpgroup_what[group] = what;
  if (++block.warpgroup_arrived[group] == 128) {
    block.warpgroup_arrived[group] = 0;
    return true;
  }
  wait(what, -1, site);
  return false;
}

void release_warpgroup() {
  Block &block = *current->block;
  for (int w = 0; w < 4; w++) block.warps[current->number / 128 * 4 + w].ready = ~0u;
}

// ---- barriers ------------------------------------------------------------------------------------------

namespace {

// True: it is complete now.
bool arrive_at(int id, int threads, Site site) {
  Block &block = *current->block;
  progress++;
  if (id < 0 || id >= NUM_BARRIERS) fail(site, "there is no barrier %d", id);
  if (threads % WARP != 0) fail(site, "barrier %d: %d threads are no whole warps", id, threads);
  Barrier &barrier = block.barriers[id];
  if (barrier.arrived > 0 && barrier.awaited != threads)
    fail(site, "barrier %d of %d threads, which others take for one of %d", id, threads, barrier.awaited);
  barrier.awaited = threads;
  barrier.arrived++;
  if (!is_complete(block, barrier)) return false;
  release_barrier(block, barrier);
  return true;
}

}  // namespace

void barrier_wait(int id, int threads, Site site) {
  Thread &thread = *current;
  Barrier &barrier = thread.block->barriers[id];
  if (arrive_at(id, threads, site)) {
    // Now and then another block goes on first.
    if (num_active > 1 && draw() % 8 == 0) pass_baton(slot_of(*thread.block));
    return;
  }
  barrier.waiting[thread.number / WARP] |= 1u << thread.lane();
  wait("waits at barrier", id, site);
}

void barrier_arrive(int id, int threads, Site site) { arrive_at(id, threads, site); }

bool any_in_block(bool it_is_so, Site site) {
  bool &is_found = current->block->is_found;
  is_found |= it_is_so;
  barrier_wait(0, 0, site);
  const bool found = is_found;
  barrier_wait(0, 0, site);
  is_found = false;
  barrier_wait(0, 0, site);
  return found;
}

void cluster_barrier(Site site) {
  Slot &first = *slots[slot_of(*current->block)->group * job.cluster];
  const uint64_t all = uint64_t(job.cluster) * unsigned(current->block->num_threads);
  const uint64_t round = first.cluster_arrived++ / all;
  progress++;
  while (first.cluster_arrived / all == round) yield("waits at the cluster's barrier", -1, site);
}

// ---- shared memory -------------------------------------------------------------------------------------

uint32_t shared_address_of(const void *pointer, Site site) {
  const Block &block = *current->block;
  const Slot &slot = *slot_of(block);
  const uint8_t *byte = static_cast<const uint8_t *>(pointer);
  const uint32_t own = block.num_in_cluster > 1 ? CLUSTER_STEP * (block.cluster_rank + 1) : 0;
  if (byte >= block.shared && byte <= block.shared + block.shared_bytes)
    return own + SHARED_BEGIN + uint32_t(byte - block.shared);
  if (byte >= slot.static_shared && byte < slot.static_shared + slot.static_bytes)
    return own + STATIC_BEGIN + uint32_t(byte - slot.static_shared);
  fail(site, "%p is no shared memory of this block", pointer);
}

uint8_t *shared_at(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
  const Block *block = current->block;
  const uint32_t rank = address / CLUSTER_STEP;
  if (rank > block->num_in_cluster) fail(site, "shared memory %#x: there is no block of this rank", address);
  if (rank > 0) block = block->cluster[rank - 1];
  const Slot &slot = *slot_of(*block);
  const uint32_t offset = address % CLUSTER_STEP;
  if (address % alignment != 0) fail(site, "shared memory %#x is no multiple of %u", address, alignment);
  if (offset >= SHARED_BEGIN && offset + bytes <= SHARED_BEGIN + block->shared_bytes)
    return block->shared + (offset - SHARED_BEGIN);
  if (offset >= STATIC_BEGIN && offset + bytes <= STATIC_BEGIN + slot.static_bytes)
    return slot.static_shared + (offset - STATIC_BEGIN);
  fail(site, "%u bytes at %#x of shared memory, which has %u", bytes, offset - SHARED_BEGIN,
       block->shared_bytes);
}

// ---- cp.async ------------------------------------------------------------------------------------------

namespace {

void add_copy(PendingCopy copy) {
  Thread &thread = *current;
  if (thread.num_copies == thread.most_copies) {
    thread.most_copies = thread.most_copies ? 2 * thread.most_copies : 64;
    thread.copies =
        static_cast<PendingCopy *>(realloc(thread.copies, size_t(thread.most_copies) * sizeof *thread.copies));
  }
  thread.copies[thread.num_copies++] = copy;
}

}  // namespace

void copy_async(uint32_t to, const void *from, int bytes, int zeros, Site site) {
  if (reinterpret_cast<uintptr_t>(from) % size_t(bytes + zeros) != 0)
    fail(site, "cp.async from %p, which is no multiple of %d", from, bytes + zeros);
  uint8_t *there = shared_at(to, uint32_t(bytes + zeros), uint32_t(bytes + zeros), site);
  poison(there, size_t(bytes + zeros));
  add_copy({there, from, bytes, zeros});
}

void copy_async_commit() { add_copy({}); }

void copy_async_wait(int pending) {
  Thread &thread = *current;
  int num_groups = 0, end = thread.num_copies;
  if (pending >= 0)
    while (end > 0 && (thread.copies[end - 1].to || num_groups < pending))
      num_groups += !thread.copies[--end].to;
  for (int i = 0; i < end; i++) {
    const PendingCopy &copy = thread.copies[i];
    if (!copy.to) continue;
    memcpy(copy.to, copy.from, size_t(copy.bytes));
    memset(static_cast<uint8_t *>(copy.to) + copy.bytes, 0, size_t(copy.zeros));
  }
  memmove(thread.copies, thread.copies + end, size_t(thread.num_copies - end) * sizeof *thread.copies);
  thread.num_copies -= end;
}

// ---- kernels -------------------------------------------------------------------------------------------

const void *register_kernel(const void *kernel, Invoke invoke) {
  for (int i = 0; i < num_kernels; i++)
    if (registry[i].kernel == kernel) return kernel;
  if (num_kernels == int(sizeof registry / sizeof *registry)) abort();
  registry[num_kernels++] = {kernel, invoke};
  return kernel;
}

void run(const void *kernel, uint3 grid, uint3 block, uint3 cluster, size_t shared_bytes, void **arguments) {
  static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&one_launch);
  launch = {grid, block, cluster, shared_bytes, launch.number + 1};
  job = {};
  job.kernel = kernel, job.invoke = invoke_of(kernel), job.arguments = arguments;
  job.num_blocks = uint64_t(grid.x) * grid.y * grid.z;
  job.cluster = int(cluster.x * cluster.y * cluster.z);
  const uint64_t num_clusters = job.num_blocks / uint64_t(job.cluster);
  int groups = device().num_multiprocessors * device().blocks_a_multiprocessor / job.cluster;
  if (groups < 1) groups = 1;
  if (uint64_t(groups) > num_clusters) groups = int(num_clusters);
  if (groups * job.cluster > MOST_SLOTS) groups = MOST_SLOTS / job.cluster;
  job.num_groups = groups;
  num_slots = num_active = groups * job.cluster;
  random_state = device().seed * 2654435761u + unsigned(launch.number) * 40503u + 1;
  if (!random_state) random_state = 1;
  progress_seen = progress, num_idle = 0;
  for (int i = 0; i < num_slots; i++) {
    if (!slots[i]) {
      slots[i] = static_cast<Slot *>(calloc(1, sizeof(Slot)));
      slots[i]->shared_end = static_cast<uint8_t *>(map_with_guards(MOST_SHARED)) + MOST_SHARED;
      pthread_cond_init(&slots[i]->turn, nullptr);
    }
    Slot &slot = *slots[i];
    slot.number = i, slot.group = i / job.cluster, slot.rank = i % job.cluster;
    slot.num_clusters = slot.cluster_arrived = 0;
    slot.is_active = true;
  }
  runner = 0;
  for (int i = 0; i < num_slots; i++)
    if (pthread_create(&slots[i]->thread, nullptr, run_slot, slots[i])) abort();
  for (int i = 0; i < num_slots; i++) pthread_join(slots[i]->thread, nullptr);
  pthread_mutex_unlock(&one_launch);
}

}  // namespace emulated
