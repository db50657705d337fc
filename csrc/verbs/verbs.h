/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to RDMA devices: what the transport and the store need of verbs, and no more. Two
 * implementations: system.c (libibverbs, loaded when it is first needed, so that one build serves
 * hosts with and without it; none.c stands in for it in a build without its headers) and the
 * tests' stub, two ends in one process.
 *
 * Only reliable connections with one-sided READ and WRITE. Handles are the implementation's own;
 * whoever made one destroys it, children first.
 */
#ifndef ISWI_VERBS_H
#define ISWI_VERBS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

#include "isw.h"

struct iswi_vdev; /* an opened device */
struct iswi_vpd;  /* protection domain: a key is valid on the queue pairs of its own domain only */
struct iswi_vmr;  /* registered memory */
struct iswi_vcq;  /* completion queue */
struct iswi_vqp;  /* queue pair */

/* What the other end may do with registered memory, and with a queue pair. */
#define ISWI_VERBS_PEER_READS  1u
#define ISWI_VERBS_PEER_WRITES 2u

struct iswi_verbs_key {
	uint32_t local;
	uint32_t remote;
};

/* One transfer, from or to memory registered under lkey. */
struct iswi_verbs_post {
	uint64_t id;
	bool write;
	bool signalled;
	uint32_t length;
	void *local;
	uint32_t lkey;
	uint32_t rkey;
	uint64_t remote;
};

struct iswi_verbs_done {
	uint64_t id;
	int error;        /* 0 or -errno; id is valid either way */
	const char *text; /* of an error, static */
};

struct iswi_verbs_qp_config {
	uint32_t port;
	uint32_t gid_index;
	uint32_t sends_max; /* transfers posted and not polled */
	unsigned int peer;  /* ISWI_VERBS_PEER_* */
};

/* How a queue pair reaches the other end's, once both are known. */
struct iswi_verbs_path {
	uint32_t port;
	uint32_t gid_index;
	uint32_t psn; /* ours */
	uint32_t mtu_bytes;
	uint32_t reads_max;  /* READs under way at once, in either direction */
	uint32_t give_up_ms; /* about how long without an answer is an error */
	struct isw_rdma_end peer;
};

struct iswi_verbs {
	const char *name;
	/*
	 * Every port of every device: fills at most max, returns how many there are, or -errno with
	 * the reason (no library, no kernel support). Blocking, any thread; so are all but the last
	 * four.
	 */
	int (*ports)(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error);
	int (*open)(const char *device, struct iswi_vdev **dev_out, struct isw_error *error);
	void (*close)(struct iswi_vdev *dev);
	/* Whether the host is removing it, and perhaps waits for who has it open. */
	bool (*is_leaving)(struct iswi_vdev *dev);
	int (*pd_make)(struct iswi_vdev *dev, struct iswi_vpd **pd_out);
	void (*pd_free)(struct iswi_vpd *pd);
	/* -ENOMEM: too much locked memory, or none left on the device. */
	int (*mr_make)(struct iswi_vpd *pd, void *memory, uint64_t bytes, unsigned int peer,
		       struct iswi_vmr **mr_out, struct iswi_verbs_key *key_out);
	/*
	 * The fence: when it returns 0, the key is dead and the other end can no longer touch the
	 * memory, whatever it does. After an error everything is as before.
	 */
	int (*mr_free)(struct iswi_vmr *mr);
	/*
	 * Puts registered memory into another domain of the same device, for what `peer` says,
	 * without looking its pages up again; the key may be another then. No fence: whoever could
	 * reach it until now must have lost the connections by which. -EOPNOTSUPP: this device
	 * cannot. After any error it is of no use but to be freed.
	 */
	int (*mr_move)(struct iswi_vmr *mr, struct iswi_vpd *pd, unsigned int peer,
		       struct iswi_verbs_key *key_out);
	/* fd_out: readable when an armed queue gets a completion; NULL: nobody will wait. */
	int (*cq_make)(struct iswi_vdev *dev, uint32_t entries, struct iswi_vcq **cq_out,
		       int *fd_out);
	void (*cq_free)(struct iswi_vcq *cq);
	/* Ready to be connected: nothing can arrive yet. */
	int (*qp_make)(struct iswi_vpd *pd, struct iswi_vcq *cq,
		       const struct iswi_verbs_qp_config *config, struct iswi_vqp **qp_out,
		       uint32_t *number_out);
	int (*qp_connect)(struct iswi_vqp *qp, const struct iswi_verbs_path *path);
	/* When it returns, no transfer that was posted there touches our memory. */
	int (*qp_free)(struct iswi_vqp *qp);

	/* The page path: no waiting. qp_fail: all that is posted is completed, with an error. */
	int (*qp_fail)(struct iswi_vqp *qp);
	/* Posts the first *count of them; on an error *count says how many were. */
	int (*post)(struct iswi_vqp *qp, const struct iswi_verbs_post *posts, uint32_t *count);
	/* Returns how many were stored, or -errno: the queue is broken. */
	int (*poll)(struct iswi_vcq *cq, struct iswi_verbs_done *done_out, uint32_t max);
	/* Takes what made fd_out readable, and asks for it again. Then poll once more. */
	int (*arm)(struct iswi_vcq *cq);
};

extern const struct iswi_verbs iswi_verbs_system;

/* rereg.c, for system.c: moves a registration without its library. 0 or -errno. */
struct ibv_mr;
struct ibv_pd;
int iswi_verbs_rereg(struct ibv_mr *mr, struct ibv_pd *pd, int access);

/* For tests, before anything else is asked of them: another implementation. */
void iswi_store_verbs_set(isw_store *store, const struct iswi_verbs *verbs);
void iswi_engine_verbs_set(isw_engine *engine, const struct iswi_verbs *verbs);

/* ---- choose.c: which port of ours leads to a peer */
struct iswi_verbs_choice {
	char device[ISW_RDMA_NAME_BYTES];
	uint32_t port;
	uint32_t gid_index;
	struct isw_rdma_end end; /* what the peer must know; number and psn are to be filled in */
};

#define ISWI_VERBS_PORTS_MAX 32u

/*
 * The port with the address from which packets to `host` (numeric or a name) leave, with the
 * RoCE v2 GID of that very address; else, if there is one, an active InfiniBand port. Errors with a
 * sentence each: -ENODEV no device, -ENETDOWN its port is down, -EADDRNOTAVAIL no RoCE v2 GID for
 * that address, -ENXIO no such host, or that of `ports`.
 */
int iswi_verbs_choose(const struct iswi_verbs *verbs, const char *host,
		      struct iswi_verbs_choice *choice_out, struct isw_error *error);
/* Likewise the port that leads to what a peer said of itself. */
int iswi_verbs_choose_for(const struct iswi_verbs *verbs, const struct isw_rdma_end *peer,
			  struct iswi_verbs_choice *choice_out, struct isw_error *error);
/*
 * How ours reaches the peer's: the smaller MTU and number of READs of both. -EINVAL: what the peer
 * says is impossible, or it is on another kind of network.
 */
int iswi_verbs_meet(const struct iswi_verbs_choice *ours, uint32_t psn,
		    const struct isw_rdma_end *peer, struct iswi_verbs_path *path_out,
		    struct isw_error *error);
/* 24 random bits, so that packets of an earlier connection do not fit this one. */
int iswi_verbs_psn(uint32_t *psn_out);

#endif
