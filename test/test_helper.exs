# What cannot run here is excluded, and said.
defn? = FlashAttention.Defn.supported?()

missing = [
  nx: if(!Code.ensure_loaded?(Nx), do: "Nx is not installed"),
  defn: if(!defn?, do: "Nx 0.12 or later is not installed"),
  nx_while:
    if(!FlashAttention.Defn.gradient_right?(:while), do: "no Nx whose gradients through while are right"),
  nx_vectorized:
    if(!FlashAttention.Defn.gradient_right?(:vectorized),
      do: "no Nx whose gradients of vectorized tensors are right"
    ),
  exla: if(!Code.ensure_loaded?(EXLA.CustomCall), do: "EXLA 0.12 or later is not installed"),
  exla_native: if(!Code.ensure_loaded?(EXLA.NIF), do: "an EXLA that computes is not installed"),
  axon: if(!(defn? and Code.ensure_loaded?(Axon)), do: "Axon on Nx 0.12 or later is not installed"),
  bumblebee:
    if(!(defn? and Code.ensure_loaded?(Bumblebee)), do: "Bumblebee on Nx 0.12 or later is not installed"),
  epmd: if(!System.find_executable("epmd"), do: "Erlang's epmd is not installed"),
  cxx: if(!System.find_executable(System.get_env("CXX") || "c++"), do: "a C++ compiler is not installed"),
  cuda: FlashAttention.backend_info().cuda,
  several_gpus:
    if(Enum.count(FlashAttention.backend_info().devices, &match?({:cuda, _}, &1.device)) < 2,
      do: "there are no two GPUs"
    )
]

excluded = for {tag, reason} when is_binary(reason) <- missing, do: {tag, reason}
for {tag, reason} <- excluded, do: IO.puts("EXCLUDED: tests tagged #{inspect(tag)}: #{reason}")

# No test may depend on how busy the machine is: what hangs is ended all the same.
ExUnit.start(exclude: Keyword.keys(excluded), timeout: 900_000, assert_receive_timeout: 300_000)
