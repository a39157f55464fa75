# Halves of a real dataset of diagrams: one labels lanes and subprocesses, the other
# participants and tasks, and the images of both show all of them. See
# docs/results/completing.md.
#   python -m studies.split_labels data/seven/bpmn_sketches --out data/halves \
#       --classes lane participant subProcess task
#   python -m studies.completing data/halves --seeds 1 2 3 4 5
_base_ = ["../own_datasets.py"]
# The published runs are older than the template's image_balance=0.5 and Muon.
model = dict(image_balance=0.0)
optim_wrapper = dict(constructor="DefaultOptimWrapperConstructor")
work_dir = "work_dirs/missing_labels"
mixture = [
    dict(name=name, root=f"data/halves/{name}", weight=1.0)
    for name in ("bpmn_sketches_a", "bpmn_sketches_b")
]
max_epochs = 2  # 600 iterations
# All classes compete in an image: which half it is from is unknown.
val_evaluator = dict(dataset_known=False)
test_evaluator = val_evaluator
moe = None
