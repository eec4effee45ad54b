# The XLA custom calls, tested in XLA itself: JAX's. XLA_ARGS: see test_xla.py.

HARNESS := $(BUILD)/test/libharness.so

$(HARNESS): test/c/harness.c test/c/cases.c test/c/tolerance.c $(wildcard test/c/*.h) $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -fvisibility=default -shared -o $@ $(filter %.c,$^) $(FA_LDFLAGS) -L$(PRIV) \
	  -Wl,-rpath,$(abspath $(PRIV)) -lflash_attention -lm

.PHONY: test-xla
test-xla: $(HARNESS)
	$(TEST_ENVIRONMENT) $(PYTHON) test/xla/test_xla.py --library $(LIBRARY) --harness $(HARNESS) $(XLA_ARGS)
