# Ablations of damex_best: each arm changes one component.
#   damex headroom configs/worlds/worlds-8_conflicting.py \
#       --baselines dense_lr2 --experts damex_best configs/_base_/interventions.py
_base_ = ["./moe/damex_best.py"]
by_token = dict(teacher_forcing=False, image_vote=False)
whole_ffns = dict(experts=dict(type="FFNExperts"), shared_expert=None)
ema = [dict(type="EMAHook", momentum=0.005)]
arms = dict(
    # Selection of the expert.
    by_token=dict(moe=by_token),
    forced_without_vote=dict(moe=dict(image_vote=False)),
    vote_without_forcing=dict(moe=dict(teacher_forcing=False)),
    # Placement of the experts.
    decoder_only=dict(moe=dict(layers=dict(encoder=None))),
    encoder_only=dict(moe=dict(layers=dict(decoder=None))),
    last_of_encoder=dict(moe=dict(layers=dict(encoder=[1]))),
    # Initialization and sharing.
    whole_ffns=dict(moe=whole_ffns),
    whole_ffns_upcycled=dict(moe=dict(whole_ffns, upcycling=dict(share=0.25))),
    shared_private=dict(
        moe=dict(
            whole_ffns,
            num_experts=None,
            fine_grained=dict(parts=4, shared=3, copies=8),
            gate=dict(_delete_=True, type="TopKGate"),
        )
    ),
    two_per_dataset=dict(
        moe=dict(num_experts=16, router=dict(type="HierarchicalRouter"))
    ),
    rank_16=dict(moe=dict(experts=dict(rank=16))),
    whole_ffns_near_their_mean=dict(
        moe=whole_ffns,
        custom_hooks=[dict(type="ExpertMeanDecayHook", decay=1.0)],
    ),
    # Other uses of the dataset.
    label_prior=dict(model=dict(label_prior=dict(source="router"))),
    # Without experts: alternatives, and general improvements.
    dense_label_prior=dict(moe=None, model=dict(label_prior=dict(source="head"))),
    dense_averaged=dict(moe=None, custom_hooks=ema),
    averaged=dict(custom_hooks=ema),
)
