"""Which transfer may send next on a shared link, and which requests to prune (MFS), pure.

`flows` says what a flow is, `urgency` how urgent it is, `policies` order flows, `batches` order and prune batches, and
`scheduler` is the one object that simulator and transfer daemon drive.
"""
