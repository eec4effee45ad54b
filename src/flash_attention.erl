%% @doc Exact attention for Erlang: a face over the Elixir module `FlashAttention', whose documentation says
%% what is computed and what each option means. Nothing is decided here but how terms are written.
%%
%% A tensor is `{Data, Type, Shape}', or a map with these three: elements in a binary, contiguous, in the
%% machine's byte order; `f32', `f64', `bf16' or `f16' (of some options `u8', `s32' or `u32'); and a tuple of
%% sizes. Results are written as the first tensor is. Options are a map or a proplist; the option `mask' is a term
%% that names the function of the Elixir module `FlashAttention.Mask' and its arguments, `{packed, [3, 2]}' or
%% `{lengths, [2, 3], [{side, left}]}', or what mask/1 made of one. Whatever is wrong comes back as
%% `{error, Map}', whose `message' is a sentence.
-module(flash_attention).

-export([forward/3, forward/4, forward_with_states/3, forward_with_states/4]).
-export([backward/2, backward/3, backward/6, backward/7]).
-export([forward/2, forward_with_states/2]).
-export([cache/1, sequence/1, append/3, fork/1, sequence_length/1, cache_info/1]).
-export([mask/1, plan/3, plan/4, backend_info/0, release/1, states_bytes/1, trim/0]).

-export_type([tensor/0, options/0, mask/0, states/0, cache/0, sequence/0, plan/0, device_info/0, error/0]).

-type type() :: f32 | f64 | bf16 | f16 | u8 | s32 | u32 | {f, 16 | 32 | 64} | {bf, 16} | {u, 8 | 32} | {s, 32}.
-type tensor() :: {Data :: term(), type(), Shape :: tuple()}
                | #{data := term(), type := type(), shape := tuple()}.
-type options() :: #{atom() => term()} | [{atom(), term()} | atom()].
-type numbers() :: [integer()] | tensor().
-type side() :: integer() | infinity.
-type mask_band() :: {QBegin :: integer(), QEnd :: integer(), KBegin :: integer(), KEnd :: integer(),
                      Left :: side(), Right :: side()}.
-type range() :: {Begin :: integer(), End :: integer()}.
-type range_type() :: full | causal | inverse_causal | bi_causal.
-type mask() :: {packed, Lengths :: [non_neg_integer()]}
              | {packed, QLengths :: [non_neg_integer()], KLengths :: [non_neg_integer()]}
              | {packed_at, CuSeqlens :: numbers()}
              | {packed_at, CuSeqlensQ :: numbers(), CuSeqlensK :: numbers()}
              | {lengths, KLengths :: numbers()} | {lengths, KLengths :: numbers(), options()}
              | {prefix, Lengths :: numbers()} | {block_causal, pos_integer() | [non_neg_integer()]}
              | {segments, QIds :: [[integer()]] | tensor()}
              | {segments, QIds :: [[integer()]] | tensor(), options()}
              | {ranges, [range()], [range()]} | {ranges, [range()], [range()], range_type() | [range_type()]}
              | {from_bands, [mask_band()] | [[mask_band()]] | tensor()}
              | {intersect_window, mask(), {side(), side()}}
              | map().
-opaque states() :: map().
-opaque cache() :: map().
-opaque sequence() :: map().
-type error() :: #{reason := atom(), argument := atom(), expected := binary() | undefined,
                   got := binary() | undefined, message := binary()}.
-type device() :: cpu | {atom(), non_neg_integer()}.
-type plan() :: #{device := device(), forward := binary(), backward := binary() | undefined}.
-type device_info() :: #{device := device(), name := binary(), features := [binary()], threads := pos_integer(),
                         memory_bytes := pos_integer() | undefined, page_bytes := non_neg_integer(),
                         memory := #{atom() => non_neg_integer()} | undefined}.

%% @doc Attention over the rows of sequences of a cache, one for each batch of Q.
-spec forward(tensor(), [sequence()]) -> {ok, tensor()} | {error, error()}.
forward(Q, Sequences) -> forward(Q, Sequences, []).

%% @doc Attention: o, of Q's shape. Causal, unless `causal' is `false'. Where K is a list of sequences of a cache,
%% they stand for k and v, and the third argument is the options.
-spec forward(tensor(), tensor(), tensor()) -> {ok, tensor()} | {error, error()};
             (tensor(), [sequence()], options()) -> {ok, tensor()} | {error, error()}.
forward(Q, Sequences, Options) when is_list(Sequences) ->
    call(forward, [in(Q), Sequences], Options, Q);
forward(Q, K, V) -> forward(Q, K, V, []).

-spec forward(tensor(), tensor(), tensor(), options()) -> {ok, tensor()} | {error, error()}.
forward(Q, K, V, Options) ->
    call(forward, [in(Q), in(K), in(V)], Options, Q).

%% @doc Attention, and beside o what the backward needs: lse, or with `keep => device' states that stay there.
-spec forward_with_states(tensor(), [sequence()]) -> {ok, tensor(), tensor()} | {error, error()}.
forward_with_states(Q, Sequences) -> forward_with_states(Q, Sequences, []).

-spec forward_with_states(tensor(), tensor(), tensor()) ->
          {ok, tensor(), tensor() | states()} | {error, error()};
                         (tensor(), [sequence()], options()) -> {ok, tensor(), tensor()} | {error, error()}.
forward_with_states(Q, Sequences, Options) when is_list(Sequences) ->
    call(forward_with_states, [in(Q), Sequences], Options, Q);
forward_with_states(Q, K, V) -> forward_with_states(Q, K, V, []).

-spec forward_with_states(tensor(), tensor(), tensor(), options()) ->
          {ok, tensor(), tensor() | states()} | {error, error()}.
forward_with_states(Q, K, V, Options) ->
    call(forward_with_states, [in(Q), in(K), in(V)], Options, Q).

%% @doc The gradients, from what `forward_with_states/4' left on the device.
-spec backward(tensor(), states()) ->
          {ok, tensor(), tensor(), tensor()} | {ok, tensor(), tensor(), tensor(), #{atom() => tensor()}} |
          {error, error()}.
backward(DOut, States) -> backward(DOut, States, []).

-spec backward(tensor(), states(), options()) ->
          {ok, tensor(), tensor(), tensor()} | {ok, tensor(), tensor(), tensor(), #{atom() => tensor()}} |
          {error, error()}.
backward(DOut, States, Options) ->
    call(backward, [in(DOut), States], Options, DOut).

%% @doc The gradients by Q, K and V of a loss whose gradient by O is DOut; of optional tensors in a map.
-spec backward(tensor(), tensor(), tensor(), tensor(), tensor(), tensor()) ->
          {ok, tensor(), tensor(), tensor()} | {ok, tensor(), tensor(), tensor(), #{atom() => tensor()}} |
          {error, error()}.
backward(DOut, Q, K, V, O, Lse) -> backward(DOut, Q, K, V, O, Lse, []).

-spec backward(tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), options()) ->
          {ok, tensor(), tensor(), tensor()} | {ok, tensor(), tensor(), tensor(), #{atom() => tensor()}} |
          {error, error()}.
backward(DOut, Q, K, V, O, Lse, Options) ->
    call(backward, [in(Tensor) || Tensor <- [DOut, Q, K, V, O, Lse]], Options, Q).

%% @doc A pool of pages in a device's memory, for keys and values that grow: `bytes', `type', `num_kv_heads',
%% `head_dim' and, if they are given, `page_size' and `device', as `FlashAttention.Cache' says.
-spec cache(options()) -> {ok, cache()} | {error, error()}.
cache(Options) when is_map(Options) -> cache(maps:to_list(Options));
cache(Options) -> plain('Elixir.FlashAttention.Cache':new(keywords(Options))).

%% @doc A sequence of the cache, without rows. Its pages go back when the term is collected, or by release/1.
-spec sequence(cache()) -> {ok, sequence()} | {error, error()}.
sequence(Cache) -> plain('Elixir.FlashAttention.Cache':sequence(Cache)).

%% @doc Appends rows of k and v to a sequence, or to each of a list of sequences of one cache.
-spec append(sequence() | [sequence()], tensor(), tensor()) -> ok | {error, error()}.
append(Sequences, K, V) -> plain('Elixir.FlashAttention.Cache':append(Sequences, in(K), in(V))).

%% @doc Another sequence with the same rows, which share their pages until one of both is appended to.
-spec fork(sequence()) -> {ok, sequence()} | {error, error()}.
fork(Sequence) -> plain('Elixir.FlashAttention.Cache':fork(Sequence)).

%% @doc How many rows a sequence has; 0 of one that was released.
-spec sequence_length(sequence()) -> non_neg_integer() | {error, error()}.
sequence_length(Sequence) -> plain('Elixir.FlashAttention.Cache':length(Sequence)).

%% @doc What a cache holds: `bytes', `num_pages', `free_pages', `page_size' and `device'.
-spec cache_info(cache()) -> map() | {error, error()}.
cache_info(Cache) -> plain('Elixir.FlashAttention.Cache':info(Cache)).

%% @doc The mask that a term describes, checked; the option `mask' takes it as it takes the term.
-spec mask(mask()) -> {ok, map()} | {error, error()}.
mask(Description) -> plain(to_mask(Description)).

%% @doc Which device and kernels calls with these tensors and options would use; nothing is computed. The backward
%% is `undefined' with a `page_table', which only the forward takes.
-spec plan(tensor(), tensor(), tensor()) -> {ok, plan()} | {error, error()}.
plan(Q, K, V) -> plan(Q, K, V, []).

-spec plan(tensor(), tensor(), tensor(), options()) -> {ok, plan()} | {error, error()}.
plan(Q, K, V, Options) ->
    case call(plan, [in(Q), in(K), in(V)], Options) of
        {ok, Plan} -> {ok, undefined_for_nil(Plan)};
        Error -> plain(Error)
    end.

%% @doc What computes here: devices, and why there is no CUDA where there is none. What is not known of a device, or
%% not there, is `undefined'.
-spec backend_info() -> #{version := binary(), devices := [device_info()], cuda := binary() | undefined}.
backend_info() -> undefined_for_nil('Elixir.FlashAttention':backend_info()).

%% @doc Gives back the memory of a device that states, a tensor or a sequence hold.
-spec release(states() | tensor() | sequence()) -> ok | {error, error()}.
release(#{'__struct__' := 'Elixir.FlashAttention.Cache.Sequence'} = Sequence) ->
    plain('Elixir.FlashAttention.Cache':release(Sequence));
release(Term) -> plain('Elixir.FlashAttention':release(in(Term))).

%% @doc How many bytes of a device's memory the states hold.
-spec states_bytes(states()) -> non_neg_integer() | {error, error()}.
states_bytes(States) -> plain('Elixir.FlashAttention.States':bytes(States)).

%% @doc Returns the memory that is at hand for later calls.
-spec trim() -> ok | {error, error()}.
trim() -> plain('Elixir.FlashAttention':trim()).

%% ---- calls there ---------------------------------------------------------------------------------------

call(Function, Tensors, Options, Like) -> result(call(Function, Tensors, Options), Like).

call(Function, Tensors, Options) ->
    case options(Options) of
        {error, _} = Error -> Error;
        There -> apply('Elixir.FlashAttention', Function, Tensors ++ [There])
    end.

%% ---- how terms are written there ---------------------------------------------------------------------------

%% What is no tensor goes on as it is: the library says what it expected.
in({Data, Type, Shape}) -> tensor(Data, Type, Shape);
in(#{'__struct__' := _} = Struct) -> Struct;
in(#{data := Data, type := Type, shape := Shape}) -> tensor(Data, Type, Shape);
in(Other) -> Other.

tensor(Data, Type, Shape) ->
    #{'__struct__' => 'Elixir.FlashAttention.Tensor', data => Data, type => type(Type), shape => Shape}.

type(f32) -> {f, 32};
type(f64) -> {f, 64};
type(f16) -> {f, 16};
type(bf16) -> {bf, 16};
type(u8) -> {u, 8};
type(s32) -> {s, 32};
type(u32) -> {u, 32};
type(Type) -> Type.

%% As a keyword list, or the error of a mask.
options(Options) when is_map(Options) -> options(maps:to_list(Options));
options(Options) when is_list(Options) ->
    try lists:map(fun option/1, proplists:unfold(Options))
    catch
        throw:{error, _} = Error -> Error;
        error:_ -> Options
    end;
options(Other) -> Other.

option({Key, undefined}) -> {Key, nil};
option({mask, Mask}) when is_tuple(Mask) -> {mask, unwrap(to_mask(Mask))};
option({mask, Mask}) -> {mask, Mask};
option({Key, Value} = Option) ->
    case lists:keymember(Key, 2, 'Elixir.FlashAttention.Options':tensors()) of
        true -> {Key, in(Value)};
        false -> Option
    end;
option(Option) -> Option.

%% Options without tensors, as a keyword list; what is none goes on as it is.
keywords(Options) when is_list(Options) ->
    try [case Option of {Key, undefined} -> {Key, nil}; _ -> Option end || Option <- proplists:unfold(Options)]
    catch error:_ -> Options
    end;
keywords(Other) -> Other.

unwrap({ok, Term}) -> Term;
unwrap(Error) -> throw(Error).

%% A mask of the function that a tuple names, with its arguments.
to_mask(Description) ->
    try {ok, apply_mask(Description)}
    catch error:#{'__struct__' := 'Elixir.FlashAttention.Error'} = Error -> {error, Error}
    end.

apply_mask({intersect_window, Mask, Window}) ->
    'Elixir.FlashAttention.Mask':intersect_window(apply_mask(Mask), Window);
apply_mask(#{'__struct__' := 'Elixir.FlashAttention.Mask'} = Mask) -> Mask;
apply_mask(Description) when is_tuple(Description), tuple_size(Description) > 1 ->
    [Name | Arguments] = tuple_to_list(Description),
    Module = 'Elixir.FlashAttention.Mask',
    Constructors = [packed, packed_at, lengths, prefix, block_causal, segments, ranges, from_bands],
    Exported = lists:member({Name, length(Arguments)}, Module:module_info(exports)),
    case Exported andalso lists:member(Name, Constructors) of
        true -> apply(Module, Name, [argument(Argument) || Argument <- Arguments]);
        false -> no_mask(Description)
    end;
apply_mask(Other) -> no_mask(Other).

no_mask(Term) ->
    Error = 'Elixir.FlashAttention.Error',
    Expected = <<"the name of a function of FlashAttention.Mask and its arguments in a tuple">>,
    error(Error:invalid(mask, Expected, Error:show(Term))).

%% Numbers may be a tensor, in options too.
argument({Data, _Type, _Shape} = Tensor) when is_binary(Data) -> in(Tensor);
argument(#{data := _} = Tensor) -> in(Tensor);
argument(Options) when is_map(Options) -> argument(maps:to_list(Options));
argument([{Key, _} | _] = Options) when is_atom(Key) -> [{Name, argument(Value)} || {Name, Value} <- Options];
argument(Other) -> Other.

%% ---- how results are written here --------------------------------------------------------------------------

result({error, _} = Error, _Like) -> plain(Error);
result(Results, Like) -> list_to_tuple([out(Term, Like) || Term <- tuple_to_list(Results)]).

out(#{'__struct__' := 'Elixir.FlashAttention.Tensor', data := Data, type := Written, shape := Shape}, Like) ->
    {Class, Bits} = Written,
    Type = list_to_existing_atom(atom_to_list(Class) ++ integer_to_list(Bits)),
    case Like of
        {_, _, _} -> {Data, Type, Shape};
        _ -> #{data => Data, type => Type, shape => Shape}
    end;
out(#{'__struct__' := _} = Struct, _Like) -> Struct;
out(Gradients, Like) when is_map(Gradients) -> maps:map(fun(_Name, Tensor) -> out(Tensor, Like) end, Gradients);
out(Other, _Like) -> Other.

plain({error, #{'__struct__' := _} = Error}) ->
    {error, undefined_for_nil(maps:without(['__struct__', '__exception__'], Error))};
plain(Result) -> Result.

%% In maps and lists as deep as they go.
undefined_for_nil(nil) -> undefined;
undefined_for_nil(Map) when is_map(Map) -> maps:map(fun(_Key, Value) -> undefined_for_nil(Value) end, Map);
undefined_for_nil(List) when is_list(List) -> [undefined_for_nil(Element) || Element <- List];
undefined_for_nil(Value) -> Value.
