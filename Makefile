# `make` alone lists the targets. Everything that is fetched or built stays in .venv/ and dist/.

PYTHON := /usr/bin/python3
VENV := .venv
DIST := dist
DESTDIR :=

# What the virtual machines of vm-tests/ run with.
VM_PACKAGES := qemu-system-x86 seabios mmdebstrap debian-archive-keyring uidmap e2fsprogs fdisk zstd

# What the tests and the demo run for real. libostree, GObject and pydbus come from here too; a PyPI build would need a compiler.
PACKAGES := ostree gir1.2-ostree-1.0 docker-registry skopeo podman buildah crun conmon rpm rpm2cpio cpio dbus systemd \
	strace uidmap qemu-utils python3-gi python3-pydbus python3-venv python3-yaml git

IN_VENV := $(VENV)/bin/python
PIP := $(IN_VENV) -m pip --quiet --disable-pip-version-check --no-input
ARCHIVE := $(DIST)/mcdaemon.pyz
SOURCES := $(shell find mcdaemon .zipapp -name '*.py' -o -type d ! -name __pycache__) .zipapp/requirements.txt

# A half-made .venv or archive must not count as made.
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

.PHONY: deps
deps: $(VENV)/.complete ## Install what tests and demo need: Debian packages (as root), and Python packages into .venv

.PHONY: test
test: vm-deps $(ARCHIVE) ## Run all tests and linters, without the virtual machines
	$(IN_VENV) -m pytest --numprocesses auto --dist loadfile

.PHONY: test-unit
test-unit: deps ## Run the tests that touch nothing but memory and a temporary directory
	$(IN_VENV) -m pytest tests/unit

# One of the scenarios, each n-th of its kill points, or a single one: see tests/crash/everywhere.py.
SCENARIO :=
STRIDE := 1
OFFSET := 0
POINT :=
VARIANT :=

.PHONY: test-crash
test-crash: deps $(ARCHIVE) ## Kill at every effect, cut the power at every write (hours); SCENARIO=live STRIDE=5 for a part
	$(IN_VENV) -m tests.crash.everywhere --scenario=$(SCENARIO) --stride=$(STRIDE) --offset=$(OFFSET) --point=$(POINT) \
		--variant=$(VARIANT)
	$(if $(SCENARIO),,MCDAEMON_CRASH=all $(IN_VENV) -m pytest tests/crash/test_disk_prefixes.py tests/crash/test_power_cut.py)

.PHONY: vm-deps
vm-deps: deps ## Install what virtual machines need beside that, from Debian's packages
	$(call apt-install,$(VM_PACKAGES))

.PHONY: vm-image
vm-image: vm-deps $(ARCHIVE) ## Build the virtual machine's disk, unless it is there with the same inputs
	PYTHONPATH=vm-tests $(IN_VENV) -m vmlab.image

# A daemon that is broken on purpose (vm-tests/vmlab/broken.py): the suite has to fail.
BROKEN :=

.PHONY: vm-test
vm-test: vm-image ## The scenarios with real reboots and power cuts, in virtual machines; BROKEN=no-fsync must fail
	$(IN_VENV) -m pytest vm-tests/scenarios --numprocesses 2 --dist load --broken=$(BROKEN)

N := 60

.PHONY: vm-soak
vm-soak: vm-image ## N power cuts, spread over an update and at random, each followed to rest
	VMLAB_CUTS=$(N) $(IN_VENV) -m pytest vm-tests/scenarios/test_power_cuts.py --numprocesses 2 --dist load

.PHONY: model
model: deps ## Explore the policy exhaustively on an abstract node, and print the numbers
	$(IN_VENV) -m tests.model

.PHONY: picture
picture: deps ## Draw the states and steps anew, in the README and tests/model/steps.svg
	$(IN_VENV) -m tests.model.picture

.PHONY: lint
lint: deps ## Check style, types and the direction of imports
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m mypy
	$(VENV)/bin/lint-imports

.PHONY: fmt
fmt: deps ## Format the sources and repair what the linter can
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

.PHONY: demo
demo: deps ## Take a node through updates and the four incidents, on real parts
	$(IN_VENV) -m tests.stand.demo

.PHONY: bench
bench: deps ## Measure the budgets, beside a peer where there is one
	$(IN_VENV) -m tests.bench

.PHONY: zipapp
zipapp: $(ARCHIVE) ## Build dist/mcdaemon.pyz: the agent in one file

.PHONY: clean
clean: ## Remove all that was fetched and built here
	rm -rf $(VENV) $(DIST) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- fetching ---------------------------------------------------------------------------------------------------------

# $(call apt-install,PACKAGES): does nothing when all are there. The packages' scripts see no running systemd, so that
# none starts a service now; and docker-registry, which would take port 5000 at the next boot, is disabled again.
define apt-install
	@missing=$$(for name in $(1); do \
		dpkg-query -W -f='$${db:Status-Status}' "$$name" 2>/dev/null | grep -qx installed || echo "$$name"; done); \
	[ -n "$$missing" ] || exit 0; \
	[ "$$(id -u)" = 0 ] || { echo "cannot install" $$missing "(run make as root, or install them yourself)" >&2; exit 1; }; \
	echo "Installing from Debian's packages:" $$missing; \
	export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1; \
	hide='mount -t tmpfs none /run/systemd && exec "$$@"'; \
	[ -d /run/systemd/system ] && set -- unshare --mount sh -c "$$hide" sh || set --; \
	set -- "$$@" apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0; \
	log=$$(mktemp); install() { "$$@" $$missing >"$$log" 2>&1; }; \
	install "$$@" --simulate || apt-get update -qq; \
	install "$$@" || { apt-get update -qq && install "$$@"; } || { cat "$$log" >&2; rm "$$log"; exit 1; }; \
	rm "$$log"; \
	case " $$(echo $$missing) " in *" docker-registry "*) SYSTEMD_OFFLINE=1 systemctl disable docker-registry 2>/dev/null || \
		echo "cannot disable docker-registry.service (see \`systemctl status docker-registry\`)" >&2;; esac
endef

$(VENV)/bin/python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python3-venv
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)

.PHONY: python3-venv
python3-venv:
	$(call apt-install,python3-venv)

$(VENV)/.complete: tests/requirements.txt Makefile
	$(call apt-install,$(PACKAGES))
	@$(MAKE) --no-print-directory $(VENV)/bin/python $(VENV)/wheels/.complete
	@echo "Installing from PyPI into $(VENV): $$(sed -n 's/^\([a-zA-Z].*\)==.*/\1/p' $< | tr '\n' ' ')"
	$(PIP) install -r $<
	@touch $@

# The pinned wheels for Python 3.9, whatever runs here; the hashes decide which file is taken (.zipapp/requirements.txt).
$(VENV)/wheels/.complete: .zipapp/requirements.txt | $(VENV)/bin/python
	@echo "Fetching from PyPI what the zipapp carries"
	$(PIP) download --no-deps --require-hashes --only-binary :all: --dest $(@D) --requirement $< \
		--python-version 3.9 --implementation cp --abi cp39 --abi none --platform manylinux2014_x86_64 --platform any
	@touch $@

$(ARCHIVE): $(SOURCES) $(VENV)/wheels/.complete
	$(IN_VENV) -IB .zipapp/build.py --wheels $(VENV)/wheels --output $@

# --- installing -------------------------------------------------------------------------------------------------------

# On an ostree node /usr/local is a link to /var/usrlocal. In a DESTDIR an absolute link would lead to the builder's own
# /var, and a relative one to a directory that may not exist yet; so its text is read and put below DESTDIR by hand.
link := $(shell readlink $(DESTDIR)/usr/local)
LOCAL := $(DESTDIR)$(if $(link),$(if $(filter /%,$(link)),$(link),/usr/$(link)),/usr/local)
UNITS := $(DESTDIR)/etc/systemd/system
SETTINGS := $(DESTDIR)/etc/mcdaemon/mcdaemon.yaml

# The enablement links are made here, with the very text that `systemctl enable` would give them: an ostree node has no
# package scripts that could call it, and presets are read only at a machine's first boot.
.PHONY: install
install: $(ARCHIVE) ## Install onto a node or, with DESTDIR=/tree, into an image
	install -D -m 0755 $(ARCHIVE) $(LOCAL)/lib/mcdaemon/mcdaemon.pyz
	install -D -m 0755 systemd/mcdaemon.sh $(LOCAL)/bin/mcdaemon
	install -D -m 0644 -t $(UNITS) systemd/mcdaemon.service systemd/mcdaemon-early.service
	install -D -m 0644 systemd/50-mcdaemon.preset $(DESTDIR)/etc/systemd/system-preset/50-mcdaemon.preset
	install -D -m 0644 systemd/mcdaemon.tmpfiles.conf $(DESTDIR)/etc/tmpfiles.d/mcdaemon.conf
	[ -e $(SETTINGS) ] || install -D -m 0644 systemd/mcdaemon.yaml $(SETTINGS)
	install -d -m 0755 $(UNITS)/multi-user.target.wants $(UNITS)/sysinit.target.wants
	ln -sfT /etc/systemd/system/mcdaemon.service $(UNITS)/multi-user.target.wants/mcdaemon.service
	ln -sfT /etc/systemd/system/mcdaemon-early.service $(UNITS)/sysinit.target.wants/mcdaemon-early.service

.PHONY: uninstall
uninstall: ## Take away what install put there; changed settings and the agent's state stay
	rm -f $(UNITS)/multi-user.target.wants/mcdaemon.service $(UNITS)/sysinit.target.wants/mcdaemon-early.service
	rm -f $(UNITS)/mcdaemon.service $(UNITS)/mcdaemon-early.service
	rm -f $(DESTDIR)/etc/systemd/system-preset/50-mcdaemon.preset $(DESTDIR)/etc/tmpfiles.d/mcdaemon.conf
	rm -f $(LOCAL)/lib/mcdaemon/mcdaemon.pyz $(LOCAL)/bin/mcdaemon
	if cmp -s systemd/mcdaemon.yaml $(SETTINGS); then rm -f $(SETTINGS); fi
	rmdir --ignore-fail-on-non-empty $(wildcard $(LOCAL)/lib/mcdaemon $(DESTDIR)/etc/mcdaemon)
