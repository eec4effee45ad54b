"""libflash_attention through ctypes, for tests and benchmarks: c_src/flash_attention.h in Python."""
import ctypes
import os

PASSES = {"forward": 0, "backward": 1}
DTYPES = {"f32": 0, "f64": 1, "bf16": 2, "f16": 3}
SIZES = "batch seqlen_q seqlen_k num_heads num_kv_heads head_dim num_sinks".split()
TENSORS = ("q k v sink o lse dout dq dk dv dsink tangent_q tangent_k tangent_v tangent_sink o_tangent "
           "lse_tangent").split()


def structure(*fields):
    """A ctypes structure of (type, "names") pairs."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


Problem = structure((ctypes.c_size_t, "struct_size"), (ctypes.c_int, "dtype"), (ctypes.c_int64, " ".join(SIZES)),
                    (ctypes.c_double, "scale"), (ctypes.c_int64, "window_left window_right"),
                    (ctypes.c_double, "softcap"), (ctypes.c_int32, "precision deterministic"),
                    (ctypes.c_int64, "origin_batch origin_head origin_row"))
Tensor = structure((ctypes.c_void_p, "data"), (ctypes.c_int64, "stride_batch stride_row stride_head"))
Tensors = structure((Tensor, " ".join(TENSORS)))
Error = structure((ctypes.c_int, "status"), (ctypes.c_char * 32, "argument"), (ctypes.c_char * 160, "expected got"),
                  (ctypes.c_char * 384, "message"))
Device = structure((ctypes.c_int, "kind"), (ctypes.c_int32, "index"))
Execution = structure((ctypes.c_void_p, "workspace"), (ctypes.c_size_t, "workspace_bytes"),
                      (ctypes.c_int32, "num_threads"), (ctypes.c_void_p, "stream"))
Plan = structure((Problem, "problem"), (ctypes.c_int, "which"), (Device, "device"), (ctypes.c_char_p, "kernel"),
                 (ctypes.c_size_t, "workspace_bytes"), (ctypes.c_int32, "num_threads"),
                 (ctypes.c_void_p, "backend config"))
CPU, CUDA = Device(0, 0), Device(1, 0)
UNBOUNDED = 2**63 - 1


class Library:
    def __init__(self, path):
        self.path, self.functions = path, ctypes.CDLL(os.path.abspath(path))
        self.functions.fa_option_find.restype = ctypes.c_void_p

    def plan(self, which, type_name, q_shape, k_shape, device=CUDA, num_sinks=0, **options):
        """The plan of a pass; options are those of fa_options()."""
        problem, plan = Problem(), Plan()
        self.functions.fa_problem_init(ctypes.byref(problem))
        problem.dtype = DTYPES[type_name]
        problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim = q_shape
        _, problem.seqlen_k, problem.num_kv_heads, _ = k_shape
        problem.num_sinks = num_sinks
        for name, value in options.items():
            self.set_option(problem, name, value)
        self.call("fa_plan_init", plan, problem, PASSES[which], device)
        return plan

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
