defprotocol FlashAttention.Training.Parameter do
  @moduledoc """
  What a tensor must know to be trained: how to be added to another, and how an optimizer moves it.
  """

  @typedoc """
  An optimizer's rule with the numbers of one step:

      {:sgd, rate, momentum}                     v = momentum * v + g,  p -= rate * v
      {:adam, rate, beta1, beta2, epsilon}       m = beta1 * m + (1 - beta1) * g
                                                 v = beta2 * v + (1 - beta2) * g * g
                                                 p -= rate * m / (sqrt(v) + epsilon)

  where `rate` and `epsilon` of Adam contain its bias corrections.
  """
  @type change ::
          {:sgd, rate :: number, momentum :: number}
          | {:adam, rate :: number, beta1 :: number, beta2 :: number, epsilon :: number}

  @doc "The sum of two tensors of one shape and type."
  @spec add(t, t) :: t
  def add(left, right)

  @doc """
  The parameter after a change, and what the rule remembers of it: its slot, `nil` before the first change.
  """
  @spec update(t, gradient :: t, slot :: term, change) :: {t, slot :: term}
  def update(parameter, gradient, slot, change)
end
