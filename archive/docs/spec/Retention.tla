----------------------------- MODULE Retention ------------------------------
\* What is deleted, and when: checkpoints, forgetting, undo, prunes, tags, pins, readers, compaction. Commits come one
\* after the other (Commits.tla has races); time passes between put and commit, plan and commit, list and delete.
EXTENDS Protocol
VARIABLES
  log, store,  \* commits, which lead to the objects of their tables and of their checkpoints; objects that there are
  made,        \* of each object ever: who put it, and whose steps it has (its own, unless compacted)
  old, aged,   \* commits up to this number, and these objects, are older than the wait
  job, other,  \* of a job: what it has put, and its last part; of others: what they have put, in place of what
  plan,        \* what a prune would delete, or a forgetting would keep, as of a commit
  pin, reader  \* of another archive: an object, and if it relies on it; a reader's commit, and the newest one by then
Init == /\ case \in DOMAIN Cases /\ log = <<>> /\ store = {} /\ made = <<>> /\ old = 0 /\ aged = {}
        /\ job = [put |-> {}, part |-> {}] /\ other = [put |-> {}, of |-> {}]
        /\ plan = [is |-> "none", what |-> {}, at |-> 0]
        /\ pin = [on |-> {}, relied |-> FALSE] /\ reader = [at |-> 0, since |-> 0]
Objects == <<case, store, made, old, aged>>
Top == Now(log)
Gone == LET named == UNION {log[n].leads : n \in DOMAIN log}
        IN  Garbage(log, old, {o \in (store \cap aged) \ named : Guard("running", made[o].by # "job")}, pin.on)
Commit(kind, leads, change) ==  \* it repeats what its parent says, with this change
  LET all == [kind |-> kind, leads |-> leads, newest |-> Top.newest, letgo |-> Top.letgo, forgot |-> Top.forgot,
              pruned |-> {}, tags |-> Top.tags]
  IN  Len(log) < Bound(1) /\ log' = Append(log, change @@ all)
Put(who, of) == LET o == Len(made) + 1 IN
  /\ o <= Bound(2) /\ made' = Append(made, [by |-> who, of |-> IF of = {} THEN o ELSE made[Max(of)].of])
  /\ store' = store \cup {o} /\ UNCHANGED <<case, log, old, aged, plan, pin, reader>>
JobPuts == Do("save") /\ job.put = {} /\ Put("job", {}) /\ job' = [job EXCEPT !.put = store' \ store] /\ UNCHANGED other
JobSaves == \E whole \in BOOLEAN, borrowed \in {{}, job.part} :  \* a partial checkpoint is not its run's newest
  LET part == job.put \cup borrowed IN
  /\ Do(IF whole THEN "save" ELSE "partial") /\ part # {} /\ MayName(log, job.put, borrowed)
  /\ Commit("save", Top.leads \cup part, IF whole THEN [newest |-> part] ELSE [kind |-> "save"])
  /\ job' = [put |-> {}, part |-> part] /\ UNCHANGED <<Objects, other, plan, pin, reader>>
OtherPuts == \E of \in {{}} \cup {{o} : o \in {o \in Top.leads : made[o].by = "other"}} :
  /\ Do(IF of = {} THEN "recover" ELSE "compact") /\ other.put = {} /\ Put("other", of)
  /\ other' = [put |-> store' \ store, of |-> of] /\ UNCHANGED job
OtherCommits ==  \* a checkpoint, made by a recovery; or a compaction
  LET moved(S) == IF other.of \cap S = {} THEN S ELSE (S \ other.of) \cup other.put IN
  /\ other.put # {} /\ MayName(log, other.put, {}) /\ Guard("moved", other.of \subseteq Top.leads)
  /\ IF other.of = {} THEN Commit("save", Top.leads \cup other.put, [newest |-> other.put])
     ELSE Commit("compact", (Top.leads \ other.of) \cup other.put, [newest |-> moved(Top.newest)])
  /\ other' = [put |-> {}, of |-> {}] /\ UNCHANGED <<Objects, job, plan, pin, reader>>
Kept == IF Off("protected") THEN {} ELSE Top.leads \cap (Top.newest \cup pin.on)
Plan(is, what) == /\ Do("plan") /\ plan' = [is |-> is, what |-> what, at |-> Len(log)] /\ plan' # plan
                  /\ UNCHANGED <<Objects, log, job, other, pin, reader>>
Planned(is, what, guard) ==  \* what a commit does; where plans are not explored, what it would as of now
  IF ~Do("plan") THEN {what} ELSE IF plan.is = is /\ Guard(guard, plan.at = Len(log)) THEN {plan.what} ELSE {}
Forget == \E keep \in Planned("forget", Kept, "decided anew") : LET n == Len(log) + 1 IN
  /\ Do("forget") /\ keep # Top.leads
  /\ Commit("forget", keep, [letgo |-> n, forgot |-> Top.forgot \cup ((Top.leads \ keep) \X {n})])
Undo == LET f == Top.letgo back == At(log, f - 1).leads \cup (Top.leads \ log[f].leads) IN
  /\ Do("undo") /\ f # 0 /\ (\A n \in f..Len(log) : log[n].kind # "compact") /\ MayUndo(log, back)
  /\ Commit("undo", back, [letgo |-> At(log, f - 1).letgo, forgot |-> {row \in Top.forgot : row[1] \notin back}])
Tag == \E t \in DOMAIN log : /\ Do("tag") /\ t \notin Top.tags /\ Cardinality(Top.tags) < 2 /\ MayTag(log, t)
                             /\ Commit("tag", Top.leads, [tags |-> Top.tags \cup {t}])
Prune == \E listed \in Planned("prune", Gone, "listed anew") : Do("prune") /\ listed \ Pruned(log) # {}
  /\ Commit("prune", Top.leads, [pruned |-> listed, forgot |-> {row \in Top.forgot : row[1] \notin listed}])
Retain == (Forget \/ Undo \/ Tag \/ Prune) /\ UNCHANGED <<Objects, job, other, plan, pin, reader>>
Delete == \E o \in Pruned(log) \cup IF Off("listed first") THEN Gone ELSE {} :
  /\ o \in store /\ Guard("pinned since", o \notin pin.on) /\ store' = store \ {o}
  /\ UNCHANGED <<case, log, made, old, aged, job, other, plan, pin, reader>>
Pin == \/ \E o \in UNION {log[n].leads : n \in DOMAIN log} : Do("pin") /\ pin.on = {} /\ pin' = [pin EXCEPT !.on = {o}]
       \/ pin.on # {} /\ Guard("pin seen", pin.on \cap Pruned(log) = {}) /\ pin' = [pin EXCEPT !.relied = TRUE]
Read == \/ reader.at # 0 /\ reader' = [at |-> 0, since |-> 0]
        \/ \E n \in DOMAIN log : /\ Do("read") /\ reader.at = 0 /\ n >= Top.letgo /\ log[n].leads \cap Pruned(log) = {}
                                 /\ reader' = [at |-> n, since |-> Len(log)]  \* who opens what was pruned is told so
Wait == /\ Do("wait") /\ aged' = store  \* longer than any reader uses a commit
        /\ old' = (IF reader.at = 0 THEN Len(log) ELSE Max({old, reader.since})) /\ <<old', aged'>> # <<old, aged>>
Others == \/ Pin /\ UNCHANGED <<Objects, log, job, other, plan, reader>>
          \/ Read /\ UNCHANGED <<Objects, log, job, other, plan, pin>>
          \/ Wait /\ UNCHANGED <<case, log, store, made, job, other, plan, pin, reader>>
Next == \/ JobPuts \/ JobSaves \/ OtherPuts \/ OtherCommits \/ Retain \/ Delete \/ Others
        \/ Plan("forget", Kept) \/ Plan("prune", Gone)
\* -- promises --------------------------------------------------------------------------------------------------------
NewestIsWhole == Top.newest \subseteq Top.leads                      \* nothing acknowledged is lost
NothingDangles == Top.leads \subseteq store                           \* nothing reachable is deleted
TagsAreWhole == UNION {log[t].leads : t \in Top.tags} \subseteq store
PinsHold == pin.relied => pin.on \subseteq store
ReadersRead == reader.at # 0 => log[reader.at].leads \subseteq store
JobsKeepTheirs == job.put \subseteq store                              \* of a session that may still commit
StepsOnce == \A a, b \in Top.leads : made[a].of = made[b].of => a = b  \* live at most once
ForgottenStaysSo == {made[o].of : o \in Forgotten(log)} \cap {made[o].of : o \in Top.leads} = {}
UndoWorks == LET f == Top.letgo IN (f # 0 /\ \A n \in f..Len(log) : log[n].pruned = {})  \* until a prune
                                   => At(log, f - 1).leads \subseteq store
=============================================================================
