"""What a run will need on accelerators that are not here: their own compilers compile its very step.

    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:4x4
"""
