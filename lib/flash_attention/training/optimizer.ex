defmodule FlashAttention.Training.Optimizer do
  @moduledoc """
  How parameters follow from gradients: gradient descent, with or without momentum, and Adam.

  With gradient `g` and learning rate `r`, for every element `p` of a parameter:

      sgd      p -= r * g
               v  = momentum * v + g,  p -= r * v                        where momentum is given

      adam     m  = beta1 * m + (1 - beta1) * g
               v  = beta2 * v + (1 - beta2) * g * g
               p -= r * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)

  Momentum is Polyak's (1964); Adam is that of Kingma and Ba (2015, arXiv 1412.6980). An optimizer is plain
  data; `FlashAttention.Training.Parameter` computes these rules for each kind of tensor, in f32 where a parameter of Nx
  has 16 bits, which is rounded to its type after each step.
  """

  alias FlashAttention.Training.{Parameter, Params}

  @enforce_keys [:rule, :learning_rate]
  defstruct [:rule, :learning_rate]

  @typedoc "A rule without its learning rate."
  @type rule ::
          {:sgd, momentum :: number}
          | {:adam, beta1 :: number, beta2 :: number, epsilon :: number}

  @type t :: %__MODULE__{rule: rule, learning_rate: number}

  @doc """
  Gradient descent. Options: `:learning_rate` (default 0.01) and `:momentum` (default 0).

      iex> FlashAttention.Training.Optimizer.sgd(momentum: 0.9).rule
      {:sgd, 0.9}
  """
  @spec sgd(keyword) :: t
  def sgd(opts \\ []) do
    opts = Keyword.validate!(opts, learning_rate: 0.01, momentum: 0)
    %__MODULE__{rule: {:sgd, opts[:momentum]}, learning_rate: opts[:learning_rate]}
  end

  @doc """
  Adam. Options: `:learning_rate` (default 0.001), `:beta1` (0.9), `:beta2` (0.999) and `:epsilon` (1.0e-8).

      iex> FlashAttention.Training.Optimizer.adam(beta2: 0.99).rule
      {:adam, 0.9, 0.99, 1.0e-8}
  """
  @spec adam(keyword) :: t
  def adam(opts \\ []) do
    opts = Keyword.validate!(opts, learning_rate: 0.001, beta1: 0.9, beta2: 0.999, epsilon: 1.0e-8)
    %__MODULE__{rule: {:adam, opts[:beta1], opts[:beta2], opts[:epsilon]}, learning_rate: opts[:learning_rate]}
  end

  @doc "The parameters and slots after step number `step`, which counts from 1."
  @spec update(t, pos_integer, Params.t(), Params.t(), slots :: map) :: {Params.t(), slots :: map}
  def update(optimizer, step, params, gradients, slots) do
    change = change(optimizer, step)
    Params.update(params, gradients, slots, &Parameter.update(&1, &2, &3, change))
  end

  # The bias corrections of Adam are the same for every element, so that they become part of the numbers:
  #     p -= r * sqrt(1 - beta2^step) / (1 - beta1^step) * m / (sqrt(v) + epsilon * sqrt(1 - beta2^step))
  defp change(%{rule: {:sgd, momentum}, learning_rate: rate}, _step), do: {:sgd, rate, momentum}

  defp change(%{rule: {:adam, beta1, beta2, epsilon}, learning_rate: rate}, step) do
    correction = :math.sqrt(1 - :math.pow(beta2, step))
    {:adam, rate * correction / (1 - :math.pow(beta1, step)), beta1, beta2, epsilon * correction}
  end
end
