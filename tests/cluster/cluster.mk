# Builds a Kubernetes control plane from source and runs tests/cluster on it. Called by `make cluster-test`.

GO ?= $(firstword $(shell command -v go) $(wildcard /usr/local/go/bin/go) build/go/go/bin/go)
CONTROL_PLANE := tests/tools/controlplane
STAMP := k8s.io/component-base/version
CRDS := sigs.k8s.io/gateway-api-inference-extension@v1.3.0

.PHONY: test programs
test: programs build/controlplane/.installed
	@# The tests run in a network namespace of their own. Pods get addresses of a documentation range (RFC 5737).
	unshare --user --map-root-user --net -- sh -c 'ip link set lo up && ip address add 192.0.2.1/24 dev lo && exec "$$@"' - \
		$(PYTHON_BIN)/pytest tests/cluster -s -m long --timeout=1800

# The first prerequisite, because the others build for minutes.
programs:
	@for tool in etcd unshare ip; do PATH="$$PATH:/usr/sbin:/sbin" command -v $$tool >/dev/null || \
		{ echo "make cluster-test needs $$tool (Debian: apt-get install etcd-server util-linux iproute2)" >&2; exit 1; }; done

# helm rejects a server without a version, so the version is stamped into the programs.
build/controlplane/.installed: $(addprefix $(CONTROL_PLANE)/,go.mod go.sum) | programs
	@mkdir -p build/controlplane/crds
	@version=$$(GOFLAGS= $(GO) list -C $(CONTROL_PLANE) -m -f '{{.Version}}' k8s.io/kubernetes) && \
	echo "kube-apiserver, kube-controller-manager $$version: 15 minutes of CPU, once" && \
	GOFLAGS= $(GO) build -C $(CONTROL_PLANE) -o $(CURDIR)/build/controlplane/ \
		-ldflags "-s -w -X $(STAMP).gitVersion=$$version -X $(STAMP).gitMajor=1 \
			-X $(STAMP).gitMinor=$$(echo $$version | cut -d. -f2)" \
		k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager
	@crds=$$(GOFLAGS= $(GO) mod download -json $(CRDS) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')/config/crd/bases && \
	install -m 644 "$$crds"/*_inferencepools.yaml "$$crds"/*_inferenceobjectives.yaml \
		"$$crds"/*_inferencemodelrewrites.yaml build/controlplane/crds
	@touch $@
