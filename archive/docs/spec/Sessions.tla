------------------------------ MODULE Sessions ------------------------------
\* Who may write, and what is durable: starts of a job (sessions) that open late, stall or die, forks, journals, their
\* end by the successor, recovery. What was added is counted in ticks <<session, number>>, objects of a journal.
EXTENDS Protocol
CONSTANT Runs  \* session -> its run; the run "fork" begins at a checkpoint of "main"
VARIABLES
  log,      \* commits: of kind "open", "save" (a checkpoint), "light" (one without buffers), "recover"
  journal,  \* session -> objects made, whether it was ended, how many a prune has deleted
  starts,   \* session -> how far it is, what it saw and goes on from, its staged checkpoint, has it looked lately
  acked,    \* ticks that were reported as durable
  found     \* what a recovery under way has read
vars == <<case, log, journal, starts, acked, found>>
Sessions == DOMAIN Runs
None == [kind |-> "none", by |-> 0, upto |-> 0, has |-> {}, order |-> 0, at |-> 0]
Init == /\ case \in DOMAIN Cases /\ log = <<>> /\ acked = {} /\ found = None
        /\ journal = [s \in Sessions |-> [made |-> 0, ended |-> FALSE, cut |-> 0]]
        /\ starts = [s \in Sessions |-> [is |-> "idle", seen |-> 0, base |-> 0, staged |-> None, looked |-> FALSE]]
By(s, kinds) == Max({n \in DOMAIN log : log[n].by = s /\ log[n].kind \in kinds})
Full == {"save", "recover"}
Value(n, field, default) == IF n = 0 THEN default ELSE log[n][field]
Upto(s) == Value(By(s, Full), "upto", 0)  \* its objects below this number are in its newest checkpoint
Ticks(s, from, to) == {<<s, n>> : n \in from..(to - 1)}
Beyond(s) == IF Upto(s) < journal[s].cut THEN {} ELSE Ticks(s, Upto(s), journal[s].made)
Held(s) == Beyond(s) \cup Value(By(s, Full \cup {"open"}), "has", {})
Newer(run) == Max(Of(log, run, Saves))
Commit(kind, s, upto, has, order) ==
  log' = Append(log, [kind |-> kind, run |-> Runs[s], by |-> s, upto |-> upto, has |-> has, order |-> order,
                      seen |-> starts[s].seen, base |-> starts[s].base,
                      adds |-> Fresh(log, IF kind \in Full THEN Ticks(s, 0, upto) ELSE {})])
Is(s, what) == starts[s].is = what
Becomes(s, what) == starts' = [starts EXCEPT ![s].is = what]
Plan(s) ==  \* of the newest checkpoint, once nothing is left to recover
  LET from == IF Runs[s] = "fork" THEN "main" ELSE Runs[s] p == Newest(log, from) IN
  /\ Is(s, "idle") /\ Do("start") /\ (Runs[s] = from \/ Newer(from) # 0)
  /\ (p # 0 => Beyond(p) = {} /\ Guard("light", Value(Newer(from), "kind", "") # "light"))
  /\ starts' = [starts EXCEPT ![s].is = "planned", ![s].seen = Len(log), ![s].base = Newer(from)]
  /\ UNCHANGED <<case, log, journal, acked, found>>
End(s) ==  \* it ends the journal of the session that it replaces, and looks if that went on
  LET p == Newest(log, Runs[s]) IN Is(s, "planned") /\ UNCHANGED <<case, log, acked, found>>
  /\ (Off("ended by any") /\ p # 0 => ~journal[p].ended)
  /\ journal' = (IF p = 0 \/ Off("ended") THEN journal ELSE [journal EXCEPT ![p].ended = TRUE])
  /\ Becomes(s, IF p = 0 \/ Guard("nothing left", Beyond(p) = {}) THEN "ending" ELSE "idle")
Open(s) == Is(s, "ending") /\ UNCHANGED <<case, journal, acked, found>>
  /\ IF ~MayOpen(log, Runs[s], starts[s].seen, Runs[s] = "fork", TRUE) THEN Becomes(s, "idle") /\ UNCHANGED log
     ELSE /\ Commit("open", s, 0, Value(starts[s].base, "has", {}), 0)
          /\ starts' = [starts EXCEPT ![s].is = "running", ![s].looked = TRUE]
Running(s) == Is(s, "running") /\ UNCHANGED case  \* or it thinks so
Tick(s) == Running(s) /\ Do("tick") /\ journal[s].made < Bound(1) /\ UNCHANGED <<log, acked, found>>
  /\ IF journal[s].ended /\ ~Off("slot") THEN Becomes(s, "over") /\ UNCHANGED journal
     ELSE journal' = [journal EXCEPT ![s].made = @ + 1] /\ UNCHANGED starts
Look(s) == /\ Running(s) /\ ~starts[s].looked /\ UNCHANGED <<log, journal, acked, found>>
           /\ starts' = [starts EXCEPT ![s].looked = TRUE, ![s].is = IF Newest(log, Runs[s]) = s THEN @ ELSE "over"]
Acknowledge(s) == /\ Running(s) /\ Do("tick") /\ Guard("look", starts[s].looked)
                  /\ acked' = acked \cup Ticks(s, 0, journal[s].made) /\ acked' # acked
                  /\ UNCHANGED <<log, journal, starts, found>>
Stage(s) == \E kind \in {"save", "light"} : LET order == Value(By(s, Saves), "order", 0) + 1 IN
  /\ Running(s) /\ Do(kind) /\ starts[s].staged = None /\ order <= Bound(2) /\ UNCHANGED <<log, journal, acked, found>>
  /\ starts' = [starts EXCEPT ![s].staged = [None EXCEPT !.kind = kind, !.upto = journal[s].made, !.order = order,
                                                         !.has = IF kind = "save" THEN Held(s) ELSE {}]]
Save(s) == LET c == starts[s].staged IN Running(s) /\ c # None /\ UNCHANGED <<journal, acked, found>>
  /\ starts' = [starts EXCEPT ![s].staged = None, ![s].is = IF MaySave(log, Runs[s], s) THEN @ ELSE "over"]
  /\ IF MaySave(log, Runs[s], s) /\ Grows(IF c.kind = "light" THEN <<>> ELSE <<Upto(s)>>, <<c.upto>>)
     THEN Commit(c.kind, s, c.upto, c.has, c.order) ELSE UNCHANGED log
Find(s) ==  \* a checkpoint of what the run's newest session has, on its behalf
  /\ Do("recover") /\ found = None /\ Newest(log, Runs[s]) = s /\ UNCHANGED <<case, log, journal, starts, acked>>
  /\ Beyond(s) # {} \/ (Value(By(s, Saves), "kind", "") = "light" /\ ~Off("light"))
  /\ found' = [kind |-> "recover", by |-> s, upto |-> Max({Upto(s)} \cup {t[2] + 1 : t \in Beyond(s)}), has |-> Held(s),
               order |-> Value(By(s, Saves), "order", 0), at |-> Newer(Runs[s])]
Recover == LET s == found.by IN found # None /\ found' = None /\ UNCHANGED <<case, journal, starts, acked>>
  /\ IF MaySave(log, Runs[s], s) /\ Guard("same base", Newer(Runs[s]) = found.at) /\ Grows(<<Upto(s)>>, <<found.upto>>)
     THEN Commit("recover", s, found.upto, found.has, found.order) ELSE UNCHANGED log
Prune(s) ==  \* of the newest session what is in a checkpoint; of others all, after a wait in which they must look
  LET own == Newest(log, Runs[s]) = s made == journal[s].made IN
  /\ Do("prune") /\ By(s, {"open"}) # 0 /\ UNCHANGED <<case, log, acked, found>>
  /\ journal' = [journal EXCEPT ![s].ended = own /\ @, ![s].cut = IF own THEN Max({@, Upto(s)}) ELSE made]
  /\ starts' = [starts EXCEPT ![s].looked = own /\ @] /\ journal' # journal
Next == Recover \/ \E s \in Sessions : Plan(s) \/ End(s) \/ Open(s) \/ Tick(s) \/ Look(s) \/ Acknowledge(s) \/ Stage(s)
                                       \/ Save(s) \/ Find(s) \/ Prune(s)
\* -- promises --------------------------------------------------------------------------------------------------------
AcknowledgedStays == \A t \in acked : t \in Held(Newest(log, Runs[t[1]]))
Before(n, kinds) == {m \in Of(log, log[n].run, kinds) : m < n}
CheckpointsStay == \A n \in DOMAIN log : log[n].kind = "open" => Max(Before(n, Saves)) \in {0, log[n].base}
NoLateStart == \A n \in DOMAIN log : log[n].kind = "open" => Max(Before(n, {"open"})) <= log[n].seen
OneWriter == \A n \in DOMAIN log : log[n].kind \in Saves => log[n].by = log[Max(Before(n, {"open"}))].by
CountedOnce == \A n, m \in DOMAIN log : n < m => log[n].adds \cap log[m].adds = {}  \* of a fenced rank, too
TrainingGrows == \A n, m \in DOMAIN log : n < m /\ log[n].by = log[m].by => log[n].order <= log[m].order
\* -- liveness: a run can always be opened again, whoever died at whichever moment ------------------------------------
Heir == Max(Sessions)
Live == Init /\ [][Next]_vars /\ WF_vars(Plan(Heir)) /\ WF_vars(End(Heir)) /\ WF_vars(Open(Heir)) /\ WF_vars(Recover)
        /\ \A s \in Sessions : WF_vars(Find(s))
Opens == <>(starts[Heir].is \in {"running", "over"})
=============================================================================
