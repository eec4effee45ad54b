# Plants the faults of faults.txt in copies of the examples' kernels:
#
#     awk -v examples=examples/truth -v into=DIRECTORY -f plant.awk faults.txt
#
# writes DIRECTORY/fault_N.cu, and DIRECTORY/faults.inc, which has each example with its fault in a namespace of its
# own, and the table of them.

function fail(why) { print "faults.txt: " why > "/dev/stderr"; failed = 1; exit 1 }

function read_all(file,   all, line) {
  while ((getline line < file) > 0) all = all line "\n"
  close(file)
  if (all == "") fail(file " is empty")
  return all
}

function plant(   kernels, at, colon) {
  number++
  kernels = read_all(examples "/" field[2] ".cu")
  at = index(kernels, field[3])
  if (!at) fail(field[1] ": \"" field[3] "\" is not in " field[2] ".cu")
  if (index(substr(kernels, at + 1), field[3])) fail(field[1] ": \"" field[3] "\" is there twice")
  printf "%s", substr(kernels, 1, at - 1) field[4] substr(kernels, at + length(field[3])) > (into "/fault_" number ".cu")
  print "namespace fault_" number " {\n#define KERNELS \"fault_" number ".cu\"\n#include \"" field[2] ".cpp\"\n#undef KERNELS\n}" > (into "/faults.inc")
  colon = index(field[5], ": ")
  table = table "    {\"" field[1] "\", fault_" number "::run, \"" substr(field[5], 1, colon - 1) "\", \"" substr(field[5], colon + 2) "\"},\n"
}

/^#/ { next }
/^$/ { if (fields) plant(); fields = 0; next }
{ field[++fields] = $0; if (fields > 5) fail(field[1] ": expected five lines") }

END {
  if (failed) exit 1
  if (fields) plant()
  print "static const struct {\n  const char *name;\n  int (*run)();\n  const char *kind, *array;\n} faults[] = {\n" table "};" > (into "/faults.inc")
}
