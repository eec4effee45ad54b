"""libflash_attention through ctypes, for tests and benchmarks. Its types are read from c_src/flash_attention.h, so
that a new tensor, size or option needs nothing here."""
import ctypes
import os
import re

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../c_src/flash_attention.h")) as file:
    HEADER = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)


def structure(*fields):
    """A ctypes structure of (type, "names") pairs."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


def body(keyword, name):
    return re.search(rf"typedef {keyword} {name} {{(.*?)\n}} {name};", HEADER, re.S)[1]


def names_of(enum, prefix):
    """{name: value} of an enum's members with that prefix: {"f32": 0, "f64": 1, ...} of FA_DTYPE_."""
    values, following = {}, 0
    for name, value in re.findall(r"(\w+)(?: = (\w+))?,", body("enum", enum)):
        values[name] = following if not value else values[value] if value in values else int(value)
        following = values[name] + (0 if name.startswith("FA_NUM_") else 1)
    return {name[len(prefix):].lower(): value for name, value in values.items() if name.startswith(prefix)}


Tensor = structure((ctypes.c_void_p, "data"), (ctypes.c_int64, "stride_batch stride_row stride_head"))
TYPES = dict(size_t=ctypes.c_size_t, int64_t=ctypes.c_int64, int32_t=ctypes.c_int32, double=ctypes.c_double,
             char=ctypes.c_char, fa_tensor=Tensor)


def length_of(text):
    return int(text) if text.isdigit() else int(re.search(rf"#define {text} (\d+)", HEADER)[1])


def read_type(name):
    """The header's type of that name: a structure, or else an enum."""
    if name not in TYPES and f"typedef struct {name} {{" in HEADER:
        members = []
        for kind, declarators in re.findall(r"(?:const )?(\w+) ([^;]+);", body("struct", name)):
            for declarator in declarators.split(","):
                star, member, length = re.match(r"\s*(\*?)(\w+)(?:\[(\w+)\])?", declarator).groups()
                pointer = ctypes.c_char_p if kind == "char" else ctypes.c_void_p
                member_type = pointer if star else read_type(kind)
                members.append((member, member_type * length_of(length) if length else member_type))
        TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return TYPES.get(name, ctypes.c_int)


PASSES = {name: names_of("fa_pass", "FA_PASS_")[name] for name in ("forward", "backward")}
DTYPES = names_of("fa_dtype", "FA_DTYPE_")
ROLES = names_of("fa_tensor_role", "FA_ROLE_")
TENSORS = list(names_of("fa_tensor_id", "FA_TENSOR_"))
Problem, Tensors, Shape, Error, Device, Execution, Plan = map(
    read_type, "fa_problem fa_tensors fa_shape fa_error fa_device fa_execution fa_plan".split())
CPU, CUDA = Device(0, 0), Device(1, 0)
UNBOUNDED = 2**63 - 1


class Library:
    def __init__(self, path):
        self.path, self.functions = path, ctypes.CDLL(os.path.abspath(path))
        self.functions.fa_option_find.restype = ctypes.c_void_p

    def problem(self, **options):
        problem = Problem()
        self.functions.fa_problem_init(ctypes.byref(problem))
        for name, value in options.items():
            self.set_option(problem, name, value)
        return problem

    def plan(self, which, type_name, q_shape, k_shape, device=CUDA, **options):
        """The plan of a pass without optional tensors; options are those of fa_options()."""
        problem = self.problem(**options)
        problem.dtype = DTYPES[type_name]
        problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim = q_shape
        _, problem.seqlen_k, problem.num_kv_heads, _ = k_shape
        return self.plan_problem(which, problem, device)

    def plan_inputs(self, which, inputs, device=CUDA, **options):
        """The plan of a pass on its inputs, {name: (type_name, shape)}."""
        problem, given = self.problem(**options), (ctypes.POINTER(Shape) * len(TENSORS))()
        for name, (type_name, dims) in inputs.items():
            shape = Shape(DTYPES[type_name], len(dims), type(Shape().dims)(*dims), -1)
            given[TENSORS.index(name)] = ctypes.pointer(shape)
        self.call("fa_problem_set_shapes", problem, PASSES[which], given)
        return self.plan_problem(which, problem, device)

    def plan_problem(self, which, problem, device):
        plan = Plan()
        self.call("fa_plan_init", plan, problem, PASSES[which], device)
        return plan

    def tensors(self, which, problem, role):
        """{name: (type_name, shape)} of the inputs or of the outputs of a pass."""
        self.functions.fa_tensor_shape.restype = Shape
        types, found = list(DTYPES), {}
        for tensor, name in enumerate(TENSORS):
            if self.functions.fa_tensor_role_in(ctypes.byref(problem), PASSES[which], tensor) == ROLES[role]:
                shape = self.functions.fa_tensor_shape(ctypes.byref(problem), tensor)
                found[name] = next(x for x in types if DTYPES[x] == shape.dtype), tuple(shape.dims[:shape.rank])
        return found

    def set_option(self, problem, name, value):
        option = ctypes.c_void_p(self.functions.fa_option_find(name.encode()))
        if isinstance(value, str):
            self.call("fa_option_set_choice", problem, option, value.encode())
        else:
            self.call("fa_option_set_number", problem, option,
                      ctypes.c_double(float("inf") if value == UNBOUNDED else value))

    def call(self, function, *arguments):
        error = Error()
        references = [ctypes.byref(x) if isinstance(x, ctypes.Structure) and not isinstance(x, Device) else x
                      for x in arguments]
        if getattr(self.functions, function)(*references, ctypes.byref(error)):
            raise RuntimeError(error.message.decode())
