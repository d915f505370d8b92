"""The dualities between attention and gradient descent, each identity a function to read next to its paper.

`theory`: the equations.

| module          | statement                                                           | paper                        |
|-----------------|---------------------------------------------------------------------|------------------------------|
| `linear`        | a layer trained by SGD is linear attention over its training tokens | Irie et al. 2022             |
| `coefficients`  | the same for momentum, decay and clipping                           | Irie et al. 2022, extended   |
| `recorder`      | records any training loop for the dual form                         |                              |
| `icl_as_update` | demonstrations are a weight update, exactly for linear attention    | Dai et al. 2023              |
| `geometry`      | how similar two weight updates, or two sets of token vectors, are   | (cosine, angles, rank, CKA)  |
| `regression`    | one linear self-attention layer is one step of gradient descent     | von Oswald, Ahn, Zhang 2023  |
| `learners`      | DeltaNet, the mesa layer, kernel attention as learners in context   | Yang, von Oswald, Cheng      |
| `features`      | three ways to realise the exponential kernel's feature map          | Ren & Liu, Choromanski 2021  |
| `kernel`        | softmax attention is one step on a kernel model                     | Ren & Liu 2024               |
| `implicit`      | a context is a rank-1 patch of the feed-forward weights             | Dherin 2025, Goldwaser 2026  |
| `sign`          | signing the values is a step on the L1 loss, not sign descent       | (an exercise, answered)      |

`on_model`: the same on Hugging Face models.

| module            | statement                                                              | paper                   |
|-------------------|------------------------------------------------------------------------|-------------------------|
| `dual_finetuning` | the fine-tuned model is the base plus attention over its training      | Irie et al. 2022        |
| `demo_tokens`     | each demonstration token's share, in context and in the update         | Irie et al. 2022        |
| `softmax_split`   | every head's softmax split into demonstrations and the rest            | Dai et al. 2023         |
| `weight_space`    | ΔW_ICL and ΔW_FT, layer by layer                                       | Dai et al. 2023         |
| `meta_gradients`  | W_V x'_i and fine-tuning's true error signals                          | Dai et al. 2023         |
| `block_patches`   | a change of every block's feed-forward weights, and how it is fitted   | Goldwaser et al. 2026   |
| `context_patch`   | a context is a rank-1 patch of every block, for one query              | Goldwaser et al. 2026   |
| `shared_patch`    | one patch for all queries, by least squares                            | Mazzawi et al. 2025     |
| `task_vector`     | a context as one state at one layer                                    | Hendel et al. 2023      |

`verify`: every identity on random data and on a model, each with the misprints that must fail.

A new identity: its equation is a function of `theory` or `on_model`, with the paper in the docstring. In the file of
that paper in `verify`, a function that returns both sides on random data is decorated with `@identity(statement,
paper)`; its misprints follow, each under `@_that.misprint(...)`. The table, `--json` and the tests find them there.

Imports go one way: theory ← on_model ← verify. Tokens are columns throughout (`X` is `d × token`), unless a docstring
says otherwise. Nothing is imported here, so that importing the package does not import torch.
"""
