"""DeepMoE (Wang et al. 2019): the channels of a layer as experts, gated per image."""
