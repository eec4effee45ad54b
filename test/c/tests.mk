# The C tests: one program a file, each ending in "N passed, N failed, N skipped".

TEST_PROGRAMS := $(patsubst test/c/%.c,$(BUILD)/test/%,$(wildcard test/c/test_*.c))
TEST_SHARED   := $(BUILD)/test/harness.o $(BUILD)/test/cases.o

$(BUILD)/test/%.o: test/c/%.c $(FLAGS) Makefile
	@mkdir -p $(@D)
	$(CC) $(FA_CFLAGS) -MMD -MP -c -o $@ $<

# The library is found where it was built, wherever that is.
$(BUILD)/test/%: $(BUILD)/test/%.o $(TEST_SHARED) $(LIBRARY)
	$(CC) -o $@ $< $(TEST_SHARED) $(FA_LDFLAGS) -L$(PRIV) -Wl,-rpath,$(abspath $(PRIV)) -lflash_attention -lm

.SECONDARY: $(TEST_PROGRAMS:%=%.o) $(TEST_SHARED)

define run_test_c
@set -e; for program in $(TEST_PROGRAMS); do echo "$$(basename $$program) $(TEST_FLAGS)"; $$program $(TEST_FLAGS); done
endef

.PHONY: test-c test-c-sanitize test-c-isas
test-c: $(TEST_PROGRAMS)
	$(run_test_c)
