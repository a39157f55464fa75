# Vanilla sparse MoE: the router finds its own division of labour, helped by a
# load-balancing loss; no dataset is named.
# Papers: Shazeer et al. 2017, arXiv 1701.06538; Chen et al. 2022, arXiv 2208.02813.
# Cost: as damex.py.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups, to compare like with like
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    # The second is Switch's (Fedus et al., arXiv 2101.03961). DAMEX's own baseline has
    # Shazeer's smooth load, LoadLoss, in its place and counts foreground tokens only,
    # tokens="foreground".
    losses=[
        dict(type="ImportanceLoss", weight=0.05),
        dict(type="LoadBalanceLoss", weight=0.05),
    ],
)
