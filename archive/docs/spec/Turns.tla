------------------------------- MODULE Turns --------------------------------
\* A checkpoint, and the forgetting that follows it on the same thread, beside others who commit as often as they like.
EXTENDS Protocol
VARIABLES saving, forget, tries  \* the next checkpoint; is it decided what is to be forgotten, and does that still hold
vars == <<case, saving, forget, tries>>
Init == case \in DOMAIN Cases /\ saving = "done" /\ forget = "asked" /\ tries = 0
Moves(from, to) == forget = from /\ forget' = to /\ UNCHANGED <<case, saving>>
Other == Moves("decided", "behind") /\ UNCHANGED tries
Decide == Moves("asked", "decided") /\ UNCHANGED tries
Forget == Moves("decided", "done") /\ UNCHANGED tries
Retry == IF tries < Bound(1) THEN Moves("behind", "asked") /\ tries' = (IF Off("bounded tries") THEN 0 ELSE tries + 1)
         ELSE Moves("behind", "done") /\ UNCHANGED tries
Ask == saving = "done" /\ saving' = "asked" /\ UNCHANGED <<case, forget, tries>>
Save == saving = "asked" /\ forget = "done" /\ saving' = "done" /\ forget' = "asked" /\ tries' = 0 /\ UNCHANGED case
Next == Other \/ Decide \/ Forget \/ Retry \/ Ask \/ Save
\* -- liveness: each checkpoint that is asked for is made -------------------------------------------------------------
Live == Init /\ [][Next]_vars /\ WF_vars(Decide) /\ WF_vars(Retry) /\ WF_vars(Forget) /\ WF_vars(Save)
EachIsSaved == saving = "asked" ~> saving = "done"
=============================================================================
