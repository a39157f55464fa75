# Vanilla sparse MoE: the router is trained by the detection loss and load-balancing
# losses, without dataset labels.
# Papers: Shazeer et al. 2017, arXiv 1701.06538; Chen et al. 2022, arXiv 2208.02813.
# Cost: as damex.py.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups, as in damex.py
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    # LoadBalanceLoss is that of Switch (Fedus et al., arXiv 2101.03961). The baseline
    # of the DAMEX paper uses LoadLoss (Shazeer et al.) instead, and counts foreground
    # tokens only (tokens="foreground").
    losses=[
        dict(type="ImportanceLoss", weight=0.05),
        dict(type="LoadBalanceLoss", weight=0.05),
    ],
)
