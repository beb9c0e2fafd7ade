------------------------------- MODULE Ledger -------------------------------
\* Prompts over crashes: each is drawn, its episode sealed, trained on and removed. A tick makes durable what was said,
\* a checkpoint has the weights, too. A recovery goes on from the newest checkpoint, and from the ticks since.
EXTENDS Protocol
VARIABLES
  rows,     \* of the ledger, as a process has said them: [prompt, state, clock]
  buffer,   \* prompts whose episodes are in the buffer
  weights,  \* prompt -> how often they were trained on it
  stored,   \* rows and buffer, as far as they are durable
  saved,    \* rows, buffer and weights of the newest checkpoint
  archived, \* prompts whose episodes have not been forgotten
  from,     \* the cursor: the first prompt that is drawn from now on, if it was not yet
  columns   \* ranks that have journaled values of a column; those that have it in the checkpoint
more == <<case, archived, from, columns>>
Prompts == 1..Bound(1)  \* rank r draws those with p % 2 = r, in order
Init == /\ case \in DOMAIN Cases /\ rows = <<>> /\ buffer = {} /\ weights = [p \in Prompts |-> 0] /\ archived = Prompts
        /\ stored = [rows |-> 0, buffer |-> {}] /\ saved = [rows |-> 0, buffer |-> {}, weights |-> weights]
        /\ from = 1 /\ columns = [said |-> {}, saved |-> {}]
Place(list, n) == IF Off("order by sequence") THEN list[n].clock * 100 + n ELSE n
State(list, p) == LET own == {n \in DOMAIN list : list[n].prompt = p} IN
  IF own = {} THEN "undrawn" ELSE list[CHOOSE n \in own : \A m \in own : Place(list, m) <= Place(list, n)].state
Undrawn(list, r) == {p \in Prompts : p % 2 = r /\ State(list, p) = "undrawn"}
First(S) == IF S = {} THEN Bound(1) + 1 ELSE CHOOSE p \in S : \A q \in S : p <= q
Says(p, before, state) == /\ State(rows, p) = before /\ Len(rows) < Bound(2) /\ UNCHANGED <<more, stored, saved>>
  /\ \E t \in (IF Do("clock") THEN 0..1 ELSE {0}) : rows' = Append(rows, [prompt |-> p, state |-> state, clock |-> t])
Draw(p) == /\ p = First({q \in Undrawn(rows, p % 2) : q >= from}) /\ Says(p, "undrawn", "drawn")
           /\ UNCHANGED <<buffer, weights>>
Seal(p) == Says(p, "drawn", "sealed") /\ buffer' = buffer \cup {p} /\ UNCHANGED weights
Train(p) == Says(p, "sealed", "trained") /\ weights' = [weights EXCEPT ![p] = @ + 1] /\ UNCHANGED buffer
Remove(p) == /\ Do("remove") /\ State(rows, p) = "trained" /\ p \in buffer /\ buffer' = buffer \ {p}
             /\ UNCHANGED <<more, rows, weights, stored, saved>>
Tick ==  \* one object has rows, steps and removals
  /\ stored' = [rows |-> Len(rows), buffer |-> IF Off("seal with its steps") THEN buffer \cap stored.buffer ELSE buffer]
  /\ stored' # stored /\ UNCHANGED <<more, rows, buffer, weights, saved>>
Save == /\ Do("save") /\ saved' = [rows |-> Len(rows), buffer |-> buffer, weights |-> weights] /\ saved' # saved
        /\ stored' = [rows |-> Len(rows), buffer |-> buffer] /\ UNCHANGED <<more, rows, buffer, weights>>
Counts(list) == IF Off("trained with the weights") THEN list  \* rows "trained" after the checkpoint do not count
  ELSE SubSeq(list, 1, saved.rows) \o SelectSeq(SubSeq(list, saved.rows + 1, Len(list)), LAMBDA r : r.state # "trained")
Crash == LET said == SubSeq(rows, 1, stored.rows) list == Counts(said)  \* and recovery
             undone == {p \in Prompts : State(list, p) = "sealed" /\ State(said, p) = "trained"} \cap archived IN
  /\ Do("crash") /\ rows' = list /\ weights' = saved.weights /\ UNCHANGED <<case, archived>>
  /\ buffer' = stored.buffer \cup IF Off("removed with the training") THEN {} ELSE undone
  /\ stored' = [rows |-> Len(list), buffer |-> buffer'] /\ saved' = stored' @@ [weights |-> weights']
  /\ from' = IF Off("cursor that all passed") THEN 1 + Max({list[n].prompt : n \in DOMAIN list})
             ELSE First(Undrawn(list, 0) \cup Undrawn(list, 1))
  /\ columns' = [columns EXCEPT !.saved = IF columns.said = {} \/ Off("columns of all") THEN columns.said ELSE {0, 1}]
Forget(p) ==  \* not what is sealed, as the session sees it, or as one would that goes on from its newest checkpoint
  /\ Do("forget") /\ p \in archived \ (buffer \cup saved.buffer) /\ State(rows, p) = "trained"
  /\ Guard("awaited", State(Counts(rows), p) # "sealed") /\ archived' = archived \ {p}
  /\ UNCHANGED <<case, rows, buffer, weights, stored, saved, from, columns>>
Column(r) == /\ Do("column") /\ columns' = [columns EXCEPT !.said = @ \cup {r}]
             /\ UNCHANGED <<case, archived, from, rows, buffer, weights, stored, saved>>
Next == \/ Tick \/ Save \/ Crash \/ Column(0) \/ Column(1)
        \/ \E p \in Prompts : Draw(p) \/ Seal(p) \/ Train(p) \/ Remove(p) \/ Forget(p)
\* -- promises --------------------------------------------------------------------------------------------------------
TrainedOnce == \A p \in Prompts : weights[p] <= 1
NoneSkipped == \A p \in Prompts : State(rows, p) = "trained" => weights[p] = 1
SealedIsThere == \A p \in Prompts : State(rows, p) = "sealed" => p \in buffer
NoneBehind == \A p \in Prompts : p < from => State(rows, p) # "undrawn"
ColumnsAreWhole == columns.saved \in {{}, {0, 1}}  \* a plan may deal its steps to any rank
=============================================================================
