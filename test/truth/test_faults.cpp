/*
 * Faults that are planted in the examples (faults.txt), and whether each is found and named. What the examples
 * find in themselves as they stand, which is nothing, they tell as programs of their own.
 */
#include <complex>

#include "check.h"
#include "flash_attention_truth.h"
#include "reference.h"

#define main run
#include "faults.inc"
#undef main

/* The finding of that kind about that array, or about one of its lines; its text. */
static const char *find(const char *kind, const char *array) {
  for (const truth::finding &f : truth::findings()) {
    const bool is_line = !strcmp(array, "line") && f.array.compare(0, 5, "line ") == 0;
    if (f.kind == kind && (f.array == array || is_line)) return f.text.c_str();
  }
  return nullptr;
}

int main() {
  truth::options().out = tmpfile();
  for (const auto &fault : faults) {
#ifndef HAS_PATTERN
    if (!strcmp(fault.name, "an uninitialised accumulator")) { /* which this compiler does not mark */
      num_skipped++;
      continue;
    }
#endif
    truth::clear_tape();
    truth::findings().clear();
    const int status = fault.run();
    const char *text = find(fault.kind, fault.array);
    CHECK(status == 1 && text, "%s: expected \"%s: %s\"", fault.name, fault.kind, fault.array);
    if (text) printf("%s\n    %s: %s\n", fault.name, fault.kind, text);
    for (const truth::finding &f : truth::findings())
      if (!text) printf("    found %s, %s: %s\n", f.kind.c_str(), f.array.c_str(), f.text.c_str());
  }
  return report();
}
