# Cases for
#
#     mix flash_attention.truth examples/truth/layer_norm.cu --kernel layer_norm_forward --backward layer_norm_backward \
#       --in x,gamma,beta --out y --case examples/truth/layer_norm.exs

for {name, rows, width, block} <- [{"one warp", 2, 20, 32}, {"more threads than numbers", 1, 70, 96}] do
  [
    name: name,
    arrays: [
      x: {:random, rows * width},
      gamma: {:random, width},
      beta: {:random, width},
      y: rows * width,
      mean: rows,
      rstd: rows,
      dx: rows * width,
      dgamma: {:zeros, width},
      dbeta: {:zeros, width}
    ],
    grid: rows,
    block: block,
    args: [:x, :gamma, :beta, :y, :mean, :rstd, width, 1.0e-5],
    backward: [
      grid: rows,
      block: block,
      args: [:x, :gamma, :mean, :rstd, :dy, :dx, :dgamma, :dbeta, width]
    ],
    gradients: [x: :dx, gamma: :dgamma, beta: :dbeta]
  ]
end
