"""The dualities between attention and gradient descent, each identity a function you can read beside its paper.

| module       | says                                                                | paper                           |
|--------------|---------------------------------------------------------------------|---------------------------------|
| `linear`     | a layer trained by SGD is linear attention over its training tokens | Irie et al. 2022                |
| `attention`  | demonstrations are a weight update, exactly for linear attention    | Dai et al. 2023                 |
| `compare`    | how alike two weight updates, or two sets of token vectors, are     | (cosine, angles, rank, CKA)     |
| `regression` | one linear self-attention layer is one step of gradient descent     | von Oswald, Ahn, Zhang 2023    |
| `learners`   | DeltaNet, the mesa layer, kernel attention as learners in context   | Yang, von Oswald, Cheng et al.  |
| `features`   | three ways to realise the exponential kernel's feature map          | Ren & Liu 2024, Choromanski 2021|
| `kernel`     | softmax attention is one step on a kernel model                     | Ren & Liu 2024                  |
| `implicit`   | a context is a rank-1 patch of the feed-forward weights             | Dherin 2025, Goldwaser 2026     |
| `sign`       | signing the values is a step on the L1 loss, not sign descent       | (an exercise, answered)         |
| `verify`     | all of the above on fresh random data, and the misprints that fail  |                                 |

and on real Hugging Face models:

| module           | says                                                                    | paper                   |
|------------------|-------------------------------------------------------------------------|-------------------------|
| `tuning`         | the fine-tuned model is the base plus attention over its training       | Irie et al. 2022        |
| `heads`          | every head's softmax split into demonstrations and the rest             | Dai et al. 2023         |
| `weight_space`   | ΔW_ICL beside ΔW_FT, layer by layer                                     | Dai et al. 2023         |
| `meta_gradients` | W_V x'_i beside fine-tuning's true error signals                        | Dai et al. 2023         |
| `head_report`    | all three for one query and one fine-tuning (`dualview heads`)          |                         |
| `shares`         | each demonstration token's share, in context and in the update          | Irie et al. 2022        |
| `context_patch`  | a context is a rank-1 patch of every block, for one query               | Goldwaser et al. 2026   |
| `reusable`       | one patch for all queries, by least squares                             | Mazzawi et al. 2025     |
| `task_vector`    | a context as one state at one layer                                     | Hendel et al. 2023      |

Tokens are columns throughout (`X` is `d × token`), unless a docstring says otherwise. Nothing is imported here, so that
importing the package does not import torch.
"""
