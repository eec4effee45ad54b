defmodule FlashAttention.Distributed.Inbox do
  @moduledoc false
  # A rank's post: a process beside it, to which other ranks send, so that what comes late does not stay in the rank's own
  # mailbox, and which watches the other ranks. It ends with the rank, or when that leaves.
  #
  # Once something went wrong, with any rank, the group is broken: whoever waits is told, and so is whoever asks later.

  use GenServer

  alias FlashAttention.Error

  # ---- for the rank ----------------------------------------------------------------------------------------

  @doc "Starts the inbox of the calling process, by a name that is the rank's own on all connected nodes."
  def start(name, rank, num_ranks), do: GenServer.start(__MODULE__, {self(), name, rank, num_ranks})

  @doc "Waits until every rank's inbox has said hello: `{:ok, %{rank => inbox}}`."
  def meet(inbox, timeout), do: ask(inbox, {:meet, timeout})

  @doc "The number of the call that begins now. What other calls left behind is forgotten."
  def next_call(inbox), do: ask(inbox, :next_call)

  @doc "What other ranks sent under these keys `{rank, topic}`, once all of it is there: a map."
  def await(_inbox, [], _timeout), do: {:ok, %{}}
  def await(inbox, keys, timeout), do: ask(inbox, {:await, keys, timeout})

  @doc "Breaks the group, for all ranks."
  def break(inbox, error), do: ask(inbox, {:break, error})

  @doc "What to call when the group breaks; `nil`: nothing."
  def on_break(inbox, fun), do: ask(inbox, {:on_break, fun})

  @doc "Breaks the group unless `unguard/1` follows soon enough: for a wait that is not for post."
  def guard(inbox, timeout), do: ask(inbox, {:guard, timeout})
  def unguard(inbox), do: ask(inbox, :unguard)

  @doc "`:ok`, or why the group is not whole any more."
  def whole(inbox), do: ask(inbox, :whole)

  @doc "What a call left is forgotten, memory too."
  def tidy(inbox), do: ask(inbox, :tidy)

  @doc "Leaves. Others hear of it from the rank itself, and so after all that it sent them."
  def leave(inbox, rank, peers) do
    for {other, peer} <- peers,
        other != rank,
        do: send(peer, {:lost, rank, lost("rank #{rank} has left the group")})

    GenServer.stop(inbox)
  catch
    :exit, _gone -> :ok
  end

  @doc "Sends to another rank's inbox. What is long goes to other nodes beside the calling process: their link may be busy."
  def post(inbox, rank, topic, value, size \\ :short) do
    message = {:post, {rank, topic}, value}

    if size == :long and node(inbox) != node(),
      do: spawn(fn -> send(inbox, message) end),
      else: send(inbox, message)

    :ok
  end

  def lost(message), do: %Error{reason: :rank_lost, message: message}

  defp ask(inbox, question) do
    GenServer.call(inbox, question, :infinity)
  catch
    :exit, _gone -> {:error, lost("this rank has left the group")}
  end

  # ---- the process -----------------------------------------------------------------------------------------

  @look_every 10

  @impl true
  def init({owner, name, rank, num_ranks}) do
    # A rank that comes twice would get the other's post.
    if :global.register_name({FlashAttention.Distributed, name, rank}, self()) == :yes do
      Process.monitor(owner)

      {:ok,
       %{
         owner: owner,
         name: name,
         rank: rank,
         num_ranks: num_ranks,
         peers: %{rank => self()},
         watched: %{},
         lost: %{},
         call: 0,
         post: %{},
         waiting: nil,
         guard: nil,
         broken: nil,
         on_break: nil
       }}
    else
      {:stop, {:shutdown, :taken}}
    end
  end

  @impl true
  def handle_call({:meet, timeout}, from, state) do
    send(self(), :look)
    missing = for rank <- 0..(state.num_ranks - 1), do: {:hello, rank}
    {:noreply, wait(state, from, missing, timeout)}
  end

  def handle_call({:on_break, fun}, _from, %{broken: nil} = state), do: {:reply, :ok, %{state | on_break: fun}}

  def handle_call(_question, _from, %{broken: error} = state) when error != nil,
    do: {:reply, {:error, error}, state}

  def handle_call({:break, error}, _from, state),
    do: {:reply, {:error, error}, break_all(state, error)}

  def handle_call(_question, {pid, _tag}, %{owner: owner} = state) when pid != owner,
    do: {:reply, {:error, Error.invalid(:group, "a call from the rank's own process", inspect(pid))}, state}

  def handle_call(question, _from, %{lost: lost} = state)
      when question in [:next_call, :whole] and lost != %{} do
    error = lost |> Map.values() |> hd()
    {:reply, {:error, error}, break_all(state, error)}
  end

  def handle_call(:next_call, _from, state) do
    {:reply, {:ok, state.call + 1}, forget(%{state | call: state.call + 1}, state.call + 1)}
  end

  def handle_call(:tidy, _from, state), do: {:reply, :ok, forget(state, state.call + 1), :hibernate}
  def handle_call(:whole, _from, state), do: {:reply, :ok, state}

  def handle_call(:unguard, _from, state) do
    cancel(state.guard)
    {:reply, :ok, %{state | guard: nil}}
  end

  def handle_call({:guard, timeout}, _from, state), do: {:reply, :ok, %{state | guard: timer(timeout)}}

  def handle_call({:await, keys, timeout}, from, state), do: {:noreply, wait(state, from, keys, timeout)}

  # Of a broken group nobody asks for it any more.
  @impl true
  def handle_info({:post, _key, _value}, %{broken: error} = state) when error != nil, do: {:noreply, state}
  def handle_info({:post, key, value}, state), do: {:noreply, state |> put_in([:post, key], value) |> serve()}

  def handle_info({:hello, rank, _inbox, _owner}, %{peers: peers} = state) when is_map_key(peers, rank),
    do: {:noreply, state}

  def handle_info({:hello, rank, inbox, owner}, state) do
    state = put_in(state.peers[rank], inbox)
    {:noreply, put_in(state.watched[Process.monitor(owner)], rank) |> serve()}
  end

  def handle_info(:look, %{waiting: {_from, [{:hello, _} | _], _timer}} = state) do
    for rank <- 0..(state.num_ranks - 1), rank != state.rank and state.peers[rank] == nil do
      with inbox when is_pid(inbox) <- :global.whereis_name({FlashAttention.Distributed, state.name, rank}),
           do: send(inbox, {:here, state.rank, self(), state.owner})
    end

    Process.send_after(self(), :look, @look_every)
    {:noreply, state}
  end

  # Who sees the other first says hello, and is answered; unless this rank has met another one by that name: who joins
  # once more waits until this one does, too.
  def handle_info({:here, rank, inbox, owner}, %{broken: nil} = state)
      when not is_map_key(state.peers, rank) or :erlang.map_get(rank, state.peers) == inbox do
    send(inbox, {:hello, state.rank, self(), state.owner})
    handle_info({:hello, rank, inbox, owner}, state)
  end

  def handle_info({:DOWN, _ref, :process, owner, _reason}, %{owner: owner} = state) do
    if state.on_break, do: spawn(state.on_break)
    {:stop, :normal, state}
  end

  def handle_info({:DOWN, ref, :process, _pid, reason}, state) do
    case state.watched do
      %{^ref => rank} -> {:noreply, lose(state, rank, lost("rank #{rank} is gone: #{reason(reason)}"))}
      _ -> {:noreply, state}
    end
  end

  def handle_info({:lost, rank, error}, state), do: {:noreply, lose(state, rank, error)}
  def handle_info({:broken, error}, state), do: {:noreply, broken(state, error)}

  def handle_info({:timeout, timer, timeout}, %{waiting: {_from, keys, timer}} = state) do
    error = lost("#{missing(state, keys)} within #{timeout} ms")
    {:noreply, break_all(state, error)}
  end

  def handle_info({:timeout, guard, timeout}, %{guard: guard} = state),
    do: {:noreply, break_all(state, lost("rank #{state.rank}: an exchange did not end within #{timeout} ms"))}

  def handle_info(_late, state), do: {:noreply, state}

  defp reason(:noproc), do: "it has ended"
  defp reason(:noconnection), do: "its node does not answer"
  defp reason(reason), do: Error.show(reason)

  # ---- waiting ---------------------------------------------------------------------------------------------

  defp wait(state, from, keys, timeout) do
    serve(%{state | waiting: {from, keys, timer(timeout)}})
  end

  defp timer(:infinity), do: nil
  defp timer(timeout), do: :erlang.start_timer(timeout, self(), timeout)

  # One that went off is a message that nobody waits for.
  defp cancel(nil), do: :ok
  defp cancel(timer), do: :erlang.cancel_timer(timer, async: true, info: false)

  defp serve(%{waiting: nil} = state), do: state
  defp serve(%{broken: error} = state) when error != nil, do: answer(state, {:error, error})

  defp serve(%{waiting: {_from, [{:hello, _} | _], _timer}} = state) do
    if map_size(state.peers) == state.num_ranks, do: answer(state, {:ok, state.peers}), else: state
  end

  defp serve(%{waiting: {_from, keys, _timer}} = state) do
    case Map.split(state.post, keys) do
      {came, post} when map_size(came) == length(keys) -> answer(%{state | post: post}, {:ok, came})
      {came, _post} -> miss(state, for({rank, _topic} = key <- keys, not is_map_key(came, key), do: rank))
    end
  end

  defp miss(state, ranks) do
    case for rank <- ranks, error = state.lost[rank], do: error do
      [error | _] -> break_all(state, error)
      [] -> state
    end
  end

  defp answer(%{waiting: {from, _keys, timer}} = state, reply) do
    cancel(timer)
    GenServer.reply(from, reply)
    %{state | waiting: nil}
  end

  defp missing(state, keys) do
    ranks = for {rank, _topic} = key <- rank_keys(keys), not there?(state, key), do: rank
    names = Enum.join(Enum.sort(Enum.uniq(ranks)), ", ")
    "#{if length(ranks) > 1, do: "ranks", else: "rank"} #{names}: nothing came"
  end

  defp rank_keys(keys), do: for({a, b} <- keys, do: if(a == :hello, do: {b, :hello}, else: {a, b}))
  defp there?(state, {rank, :hello}), do: Map.has_key?(state.peers, rank)
  defp there?(state, key), do: Map.has_key?(state.post, key)

  # A rank that is gone is missed by who waits for it, not by who has had all of it: it may have been done.
  defp lose(state, rank, error) do
    if state.on_break, do: spawn(state.on_break)
    serve(%{state | on_break: nil, lost: Map.put_new(state.lost, rank, error)})
  end

  # ---- the end ---------------------------------------------------------------------------------------------

  # Others hear of it before this rank does: it may end then, and they are to know what came first.
  defp break_all(%{broken: nil} = state, error) do
    for {rank, inbox} <- state.peers, rank != state.rank, do: send(inbox, {:broken, error})
    broken(state, error)
  end

  defp break_all(state, _error), do: state

  defp broken(%{broken: nil} = state, error) do
    if state.on_break, do: spawn(state.on_break)
    serve(%{state | broken: error, post: %{}})
  end

  defp broken(state, _error), do: state

  # Posts of calls to come stay: other ranks may be ahead.
  defp forget(state, call),
    do: %{state | post: Map.filter(state.post, fn {{_rank, topic}, _value} -> elem(topic, 0) >= call end)}
end
