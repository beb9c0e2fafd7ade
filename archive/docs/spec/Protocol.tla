------------------------------ MODULE Protocol ------------------------------
\* The guards that modules and observed traces share. A guard has a name; a mutant is a case of a configuration that
\* lists it as `off`. Commits are records of a log: what they lead to, what they let go of, sessions that they open.
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANT Cases  \* what is explored: a sequence of [off: guards that are taken out, do: kinds of actions, most: bounds]
VARIABLE case
Off(guard) == guard \in Cases[case].off
Guard(guard, condition) == IF Off(guard) THEN TRUE ELSE condition
Do(kind) == kind \in Cases[case].do
Bound(n) == Cases[case].most[n]
Max(S) == IF S = {} THEN 0 ELSE CHOOSE n \in S : \A m \in S : m <= n
\* -- objects ---------------------------------------------------------------------------------------------------------
Empty == [kind |-> "empty", leads |-> {}, newest |-> {}, letgo |-> 0, forgot |-> {}, pruned |-> {}, tags |-> {}]
At(l, n) == IF n = 0 THEN Empty ELSE l[n]
Now(l) == At(l, Len(l))
Pruned(l) == UNION {l[n].pruned : n \in DOMAIN l}
Retained(l) == Now(l).leads \cup IF Off("retained") THEN {} ELSE UNION {l[t].leads : t \in Now(l).tags}
When(l, o) == Max({row[2] : row \in {row \in Now(l).forgot : row[1] = o}})  \* the commit that let go of it
Forgotten(l) == {row[1] : row \in Now(l).forgot}
RECURSIVE Standing(_, _, _)  \* the newest forgetting up to commit `old` that is not undone as of commit n
Standing(l, n, old) == LET f == At(l, n).letgo IN IF f <= old THEN f ELSE Standing(l, f - 1, old)
Since(l, old) == IF ~Off("wait of what stands") THEN Standing(l, Len(l), old)
                 ELSE IF At(l, old).letgo < Now(l).letgo THEN At(l, old).letgo ELSE Now(l).letgo
Garbage(l, old, unnamed, pinned) ==  \* old: the newest commit older than the wait; unnamed: what nobody can commit now
  LET superseded == {o \in UNION {l[n].leads : n \in DOMAIN l} \ Forgotten(l) :
                     Since(l, old) # 0 /\ \A n \in Since(l, old)..Len(l) : o \notin l[n].leads}
  IN  ({o \in Forgotten(l) : Guard("wait", When(l, o) <= old)} \cup superseded \cup unnamed)
      \ (Retained(l) \cup pinned \cup Pruned(l))
MayName(l, new, borrowed) == /\ Guard("named", new \cap Pruned(l) = {})
                             /\ Guard("borrowed", borrowed \cap (Forgotten(l) \cup Pruned(l)) = {})
MayUndo(l, back) == Guard("undone whole", back \cap UNION {l[n].pruned : n \in Now(l).letgo..Len(l)} = {})
MayTag(l, t) == Guard("tagged", t >= Now(l).letgo) /\ Guard("tagged whole", l[t].leads \cap Pruned(l) = {})
\* -- sessions --------------------------------------------------------------------------------------------------------
Of(l, run, kinds) == {n \in DOMAIN l : l[n].run = run /\ l[n].kind \in kinds}
Saves == {"save", "light", "recover"}
Opened(l, run) == Max(Of(l, run, {"open"}))
Newest(l, run) == IF Opened(l, run) = 0 THEN 0 ELSE l[Opened(l, run)].by
MayOpen(l, run, seen, forks, takes) ==  \* takes: it goes on from all that the run has
  /\ Guard("seen", Opened(l, run) <= seen)
  /\ Guard("no newer checkpoint", takes => Max(Of(l, run, Saves)) <= seen)
  /\ Guard("begun once", forks => Of(l, run, Saves) = {})
MaySave(l, run, by) == Guard("fence", Newest(l, run) = by)
Grows(before, after) == Guard("grows", \A r \in DOMAIN before : r \in DOMAIN after /\ after[r] >= before[r])
Fresh(l, rows) == rows \ IF Off("rows once") THEN {} ELSE UNION {l[n].adds : n \in DOMAIN l}
=============================================================================
