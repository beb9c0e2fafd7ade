------------------------------ MODULE Commits -------------------------------
\* One more commit, whoever commits beside: numbered files that are created once, answers that are lost, requests that
\* arrive late, writers that stall or die, and several of one intent (each rank may complete a checkpoint).
EXTENDS Protocol
CONSTANT Intents  \* writer -> the key of what it is to commit
VARIABLES
  files,    \* number -> the intent of the commit that is there, "" where there is none
  ever,     \* number -> the intents of all commits that were ever created there
  writers,  \* writer -> how far it is, and the newest commit that it knows
  sent,     \* requests on their way, <<writer, number>>
  acked     \* what a writer was told, <<intent, number>>
vars == <<case, files, ever, writers, sent, acked>>
Writers == DOMAIN Intents
Numbers == 1..Bound(1)
Top == Max({n \in Numbers : files[n] # ""})
Init == /\ case \in DOMAIN Cases /\ files = [n \in Numbers |-> ""] /\ ever = [n \in Numbers |-> {}]
        /\ writers = [w \in Writers |-> [is |-> "idle", known |-> 0]] /\ sent = {} /\ acked = {}
Becomes(w, is, known) == writers' = [writers EXCEPT ![w] = [is |-> is, known |-> known]]
Succeeds(w, n) == Becomes(w, "done", n) /\ acked' = acked \cup {<<Intents[w], n>>}
CatchUp(w) == LET n == writers[w].known + 1 IN  \* it reads the commits since; one of its own intent is its success
  /\ writers[w].is = "idle" /\ UNCHANGED <<case, files, ever, sent>>
  /\ IF n \notin Numbers \/ files[n] = "" THEN Becomes(w, "drafted", n - 1) /\ UNCHANGED acked
     ELSE IF files[n] = Intents[w] /\ ~Off("found by its intent") THEN Succeeds(w, n)
     ELSE Becomes(w, "idle", IF Off("every commit since") THEN Top ELSE n) /\ UNCHANGED acked
Send(w) == LET n == writers[w].known + 1 IN
  /\ writers[w].is = "drafted" /\ n \in Numbers /\ sent' = sent \cup {<<w, n>>} /\ Becomes(w, "sent", n - 1)
  /\ UNCHANGED <<case, files, ever, acked>>
Arrive == \E r \in sent, again \in BOOLEAN, answered \in BOOLEAN :
  LET w == r[1] n == r[2] creates == files[n] = "" \/ Off("create") IN
  /\ ((again \/ ~answered) => Do("lost")) /\ sent' = (IF again THEN sent ELSE sent \ {r}) /\ UNCHANGED case
  /\ files' = (IF creates THEN [files EXCEPT ![n] = Intents[w]] ELSE files)
  /\ ever' = (IF creates THEN [ever EXCEPT ![n] = @ \cup {Intents[w]}] ELSE ever)
  /\ IF ~answered \/ writers[w] # [is |-> "sent", known |-> n - 1] THEN UNCHANGED <<writers, acked>>
     ELSE IF creates THEN Succeeds(w, n) ELSE Becomes(w, "idle", n - 1) /\ UNCHANGED acked
NoAnswer(w) == /\ Do("lost") /\ writers[w].is = "sent" /\ Becomes(w, "idle", writers[w].known)  \* it looks again
               /\ UNCHANGED <<case, files, ever, sent, acked>>
Remove == /\ Off("commits stay") /\ UNCHANGED <<case, ever, writers, sent, acked>>  \* a prune that deletes old commits
          /\ \E n \in Numbers : n < Top /\ files[n] # "" /\ files' = [files EXCEPT ![n] = ""]
Next == Arrive \/ Remove \/ \E w \in Writers : CatchUp(w) \/ Send(w) \/ NoAnswer(w)
\* -- promises --------------------------------------------------------------------------------------------------------
NoGaps == \A n \in 1..Top : files[n] # ""
OnceCommitted == \A n, m \in Numbers : files[n] # "" /\ files[n] = files[m] => n = m
NumbersGivenOnce == \A n \in Numbers : Cardinality(ever[n]) <= 1
AcknowledgedStays == \A a \in acked : files[a[2]] = a[1]
\* -- liveness: whoever goes on gets its commit in, once a store answers ----------------------------------------------
Live == Init /\ [][Next]_vars /\ \A w \in Writers : /\ WF_vars(CatchUp(w)) /\ WF_vars(Send(w)) /\ WF_vars(NoAnswer(w))
                                                   /\ SF_vars(Arrive /\ writers'[w].is \notin {writers[w].is, "sent"})
EachCommits == \A w \in Writers : <>(writers[w].is = "done")
=============================================================================
