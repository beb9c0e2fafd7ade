------------------------------- MODULE Trace --------------------------------
\* What was observed of archives, event by event: each must be a step that the guards allow, with observed commits and
\* objects in place of those that the other modules choose. README.md says what an observation is.
EXTENDS Protocol, Integers
CONSTANT Traces
VARIABLES
  log, store,  \* commits; object -> who put it, when, and its place in a journal, of the objects that there are
  journal,     \* journal of a rank -> objects made, and the number at which it was ended (-1: it was not)
  pins, at     \* what other archives rely on; a trace, and how many of its events have been allowed
None == [o \in {} |-> {}]
Init == case = 1 /\ log = <<>> /\ store = None /\ journal = None /\ pins = {} /\ at \in (DOMAIN Traces) \X {0}
Get(f, key, default) == IF key \in DOMAIN f THEN f[key] ELSE default
Made(j) == Get(journal, j, [made |-> 0, ended |-> -1])
With(f, key, value) == (key :> value) @@ f
Upto(s) == LET n == Max({n \in DOMAIN log : log[n].by = s /\ log[n].upto # None}) IN IF n = 0 THEN None ELSE log[n].upto
Running == {Newest(log, log[n].run) : n \in {n \in DOMAIN log : log[n].kind = "open"}}
Unnamed(cutoff) == {o \in DOMAIN store : LET put == store[o] IN
  /\ put.time <= cutoff /\ \A n \in DOMAIN log : o \notin log[n].leads
  /\ put.by \notin Running \/ put.number < Get(Upto(put.by), put.journal, 0)}
Waited(cutoff) == Max({n \in DOMAIN log : log[n].time <= cutoff})
Committed(e) == LET new == e.leads \ Now(log).leads opens == e.kind = "open" IN [
  create |-> e.number = Len(log) + 1, written |-> e.leads \subseteq DOMAIN store,
  intent |-> Guard("found by its intent", \A n \in DOMAIN log : log[n].intent # e.intent),
  names |-> MayName(log, new, e.borrowed \ Now(log).leads), rows |-> e.adds \subseteq Fresh(log, e.adds),
  opens |-> opens => MayOpen(log, e.run, e.seen, e.forks, e.takes),
  ended |-> Guard("ended", opens => \A j \in e.ends : Made(j).ended >= 0),
  fence |-> e.kind \in Saves \cup {"commit"} => Opened(log, e.run) # 0 /\ MaySave(log, e.run, e.by),
  grows |-> e.kind \in Saves => Grows(Upto(e.by), IF e.upto = None THEN Upto(e.by) ELSE e.upto),
  undone |-> e.kind = "undo" => MayUndo(log, new), tagged |-> \A t \in e.tags \ Now(log).tags : MayTag(log, t),
  forgot |-> \A row \in e.forgot \ Now(log).forgot : row[2] = e.number,
  listed |-> e.pruned # {} => e.pruned \ Pruned(log) \subseteq Garbage(log, Waited(e.cutoff), Unnamed(e.cutoff), pins)]
Allowed(e) == CASE e.event = "commit" -> Committed(e)
  [] e.event = "put" -> [fresh |-> e.object \notin DOMAIN store]
  [] e.event \in {"tick", "end"} -> [slot |-> e.object \notin DOMAIN store, gap |-> e.number = Made(e.journal).made]
  [] e.event = "delete" -> [listed |-> e.object \in Pruned(log), needed |-> e.object \notin Retained(log) \cup pins]
  [] e.event = "durable" -> [there |-> e.number <= Made(e.journal).made,
                             look |-> Guard("look", Made(e.journal).ended \in {-1} \cup e.number..Made(e.journal).made)]
  [] e.event = "told" -> [there |-> e.number \in DOMAIN log /\ log[e.number].intent = e.intent]
  [] e.event = "pin" -> [seen |-> Guard("pin seen", e.objects \cap Pruned(log) = {})]
Puts(e) == store' = IF e.event \in {"put", "tick", "end"} THEN With(store, e.object, e)
                    ELSE IF e.event = "delete" THEN [o \in DOMAIN store \ {e.object} |-> store[o]] ELSE store
Next == LET t == at[1] i == at[2] + 1 e == Traces[t][i] may == Allowed(e) refused == {g \in DOMAIN may : ~may[g]} IN
  /\ i <= Len(Traces[t]) /\ UNCHANGED case
  /\ IF refused = {} THEN TRUE ELSE PrintT(<<"refused", t, i, refused>>) /\ FALSE
  /\ at' = <<t, i>> /\ Puts(e) /\ log' = (IF e.event = "commit" THEN Append(log, e) ELSE log)
  /\ journal' = CASE e.event = "tick" -> With(journal, e.journal, [Made(e.journal) EXCEPT !.made = e.number + 1])
                  [] e.event = "end" -> With(journal, e.journal, [Made(e.journal) EXCEPT !.ended = e.number])
                  [] OTHER -> journal
  /\ pins' = IF e.event = "pin" THEN pins \cup e.objects ELSE pins
=============================================================================
