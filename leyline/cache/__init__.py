"""The cache: who owns which slot (ledger), where rows are found (radix, prefix), and the rows.

Three of the four modules are mind and import no tensor library; only `latent` holds tensors.
For that reason this file imports none of them.
"""
