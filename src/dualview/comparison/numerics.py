"""The version of dualview's numbers: what a stored cell depends on, together with its inputs and the libraries.

Raise `NUMERICS_VERSION` by one whenever a change can move a number of a run by more than rounding: a formula, a seed,
a default, the order of a draw, which tokens or layers are read, a new or removed control. Add a line to the history,
then run `python tests/golden/write.py`. A sweep recomputes every stored cell of an older version, so do not raise it
for comments, names, new columns, messages or speed. `tests/golden` fails if numbers move and the version does not.

History:

1. The first explicit version. Cells stored before it hold a hash of the source code instead.
2. The verdict in levels, agreement and label contrast; controls with a random draw in several draws, and trained ones
   at the size of fine-tuning's update.
3. The rotations remove the span of the heads' own outputs, and the floor `head_span` replaces `zsl_direction`. Full
   controls have the ceiling `ft_distilled`.
4. Agreement is also tested by the queries' signs and beyond their lengths, and levels have the p-values over queries
   that a verdict over draws needs. What a query has beyond the mean update is at most 1 in a floor, and controls with
   several draws are read on Fisher's scale.
5. Untrained weights are drawn by numpy.
6. Agreement is also tested beyond any bent or class-wise shrinking of the zero-shot log-odds. The rotations compare the
   cosines of what is beyond the mean update, not shares of the whole, and remove the zero-shot direction after it.
7. The rotations and `head_span` remove the direction that all queries share together with the heads' span.
8. In the rotations of the label contrast layers count by how far flipped labels change them.
9. Outputs are compared within classes: with other queries of the class, and beyond what the class shares. Rotations
   know the few directions that both settings write in, and the tail of their cosines. Agreement is also tested beyond
   any bent function of the zero-shot scores. The heads' span has no direction that is rounding.
10. The rotations and `head_span` also remove what grows with the strength of a query's update along its class's, with
    its length and with zero-shot's log-odds of its label (`metrics.floors.covariates`). Without learning no other level
    is testable.
11. The rotations also remove the two directions that ICL and FT share most, found on other queries. A similarity is
    contradicted only where every test made from the records says so, at the p that support needs. Over draws, the
    largest p of draws that are each supported will do, too. `detectable` counts the draws of controls.
12. The directions that ICL and FT share most stay only in blocks of queries where neither has a tenth of its length
    left (before: in queries, a fifth). Predictions alone contradict nothing where the other levels were tested and show
    nothing. Over draws a level needs half of them. Patches and adapters have a twin that learnt from flipped labels.
13. The size of a control that is trained or scaled to FT's follows a power of its rate, not the rate itself: more of
    them get there within four rounds.
14. Of these rounds the nearest counts, not the last, and between a rate that gave too little and one that gave too much
    the next lies between them.
"""

NUMERICS_VERSION = 14
