# The XLA custom calls, tested in XLA itself: JAX's. XLA_ARGS: see test_xla.py.

HARNESS := $(BUILD)/test/libharness.so

# With the library's objects, as it looks behind the public header.
$(HARNESS): REPLACED := $(if $(ORACLE),$(BUILD)/cpu/reference.o)
$(HARNESS): test/c/harness.c test/c/cases.c test/c/tolerance.c $(wildcard test/c/*.h) $(OBJECTS) $(ORACLE)
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -fvisibility=default -shared -o $@ $(filter %.c %.o,$(filter-out $(REPLACED),$^)) $(FA_LDFLAGS) $(CUDA_LIBS) -lm

# The sanitizer's runtime must be there first, and the C++ library under it, for Python to load what is built with it.
XLA_ENVIRONMENT := $(TEST_ENVIRONMENT) $(if $(SANITIZE),ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 \
  LD_PRELOAD='$(foreach library,libasan.so libstdc++.so.6,$(shell $(CC) -print-file-name=$(library)))')

.PHONY: test-xla test-xla-calls test-xla-shards test-xla-sanitize
test-xla: test-xla-calls $(if $(findstring cuda,$(XLA_ARGS)),,test-xla-shards)

test-xla-calls: $(HARNESS) $(LIBRARY)
	$(XLA_ENVIRONMENT) $(PYTHON) test/xla/test_xla.py --library $(LIBRARY) --harness $(HARNESS) $(XLA_ARGS)

test-xla-shards: $(LIBRARY)
	$(XLA_ENVIRONMENT) $(PYTHON) test/xla/test_shards.py --library $(LIBRARY) \
	  $(if $(findstring cuda,$(XLA_ARGS)),--platform cuda)

test-xla-sanitize:
	UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test-xla SANITIZE=address,undefined FA_CUDA=0 \
	  BUILD=$(BUILD)/sanitize PRIV=$(BUILD)/sanitize/priv XLA_ARGS=--quick
