defmodule FlashAttention.Distributed.Stages do
  @moduledoc false
  # What a rank computes one after the other: its rows beside its own columns first, then beside those of other ranks.
  #
  # Stage 0 is a rank's own. Each of the others has the columns of a few ranks, which are so many further on in the
  # circle of ranks: the same distances for all, so that each rank knows whom it sends to, too.

  alias FlashAttention.Distributed.{Bands, Deal, Ranges}

  @doc """
  The stages of a rank: `sources` are the owners of its columns with the ranges that come from each, `bands` what its
  rows see of those columns, one owner's behind the other's, a list a batch.
  """
  def of(deal, rank, num_stages) do
    for distances <- distances(deal.num_ranks, num_stages) do
      sources =
        for distance <- distances,
            owner = rem(rank + distance, deal.num_ranks),
            # A rank's own columns are all there anyway.
            ranges = if(distance == 0, do: deal.columns[rank], else: Deal.needed(deal, rank, owner)),
            distance == 0 or ranges != [],
            do: {owner, ranges}

      %{sources: sources, bands: local_bands(deal, rank, sources)}
    end
  end

  @doc "Whom a rank gives columns to in each stage, and which ranges of them: `{rank, ranges}`."
  def targets(deal, rank, num_stages) do
    for distances <- distances(deal.num_ranks, num_stages) do
      for distance <- distances,
          distance > 0,
          target = Integer.mod(rank - distance, deal.num_ranks),
          ranges = Deal.needed(deal, target, rank),
          ranges != [],
          do: {target, ranges}
    end
  end

  # Near ranks first, as those that a window reaches are.
  defp distances(1, _num_stages), do: [[0]]

  defp distances(num_ranks, num_stages) do
    length = div(num_ranks - 2, num_stages) + 1
    [[0] | Enum.chunk_every(Enum.to_list(1..(num_ranks - 1)), length)]
  end

  def count_columns(sources),
    do: sources |> Enum.map(fn {_rank, ranges} -> Ranges.count(ranges) end) |> Enum.sum()

  defp local_bands(deal, rank, sources) do
    rows = Ranges.placed(deal.rows[rank])

    {columns, _end} =
      Enum.flat_map_reduce(sources, 0, fn {_owner, ranges}, at ->
        {Ranges.placed(ranges, at), at + Ranges.count(ranges)}
      end)

    batches = for bands <- deal.bands, do: Bands.local(bands, rows, columns)
    most = batches |> Enum.map(&length/1) |> Enum.max()
    # The library wants as many in every batch.
    for bands <- batches, do: bands ++ List.duplicate({0, 0, 0, 0, 0, 0}, most - length(bands))
  end
end
