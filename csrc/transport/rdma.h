/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport: a queue is one reliable connection, whose READs and WRITEs the donor's
 * processor does not see. A page's place there is an address and a key, by slot, told by the donor
 * over the control session.
 *
 * To connect takes two steps, because each end must know the other's: an offer (rdma_offer.c) makes
 * the queue pairs, Python tells the donor and brings its answer, and connect takes the queues out
 * of the offer.
 */
#ifndef ISWI_TRANSPORT_RDMA_H
#define ISWI_TRANSPORT_RDMA_H

#include <pthread.h>
#include <stdatomic.h>

#include "transport/transport.h"
#include "verbs/verbs.h"

extern const struct iswi_transport_ops iswi_transport_rdma;

/* ---- rdma_domain.c */
#define ISWI_RDMA_DOMAINS_MAX 8u

/*
 * A device opened for one engine: its protection domain, and the staging buffers registered there.
 * Closed when its last user leaves, because a device that is not used must be free to go.
 */
struct iswi_rdma_domain {
	struct iswi_rdma_domains *domains;
	char device[ISW_RDMA_NAME_BYTES];
	struct iswi_vdev *dev;
	struct iswi_vpd *pd;
	struct iswi_vmr *mr;
	const char *memory;
	uint64_t bytes;
	uint32_t lkey;
	/* Under domains->lock. */
	uint32_t users; /* queues and offers; 0: the place is free */
	bool failed;    /* the next user opens the device again: it may be another by now */
	/* Written under domains->lock: the host is removing it. Pair: is_leaving, any control
	 * thread. */
	atomic_bool leaving;
};

/* The domains of one engine. */
struct iswi_rdma_domains {
	const struct iswi_verbs *verbs;
	pthread_mutex_t lock; /* a leaf; held while a device is opened or closed */
	struct iswi_rdma_domain domain[ISWI_RDMA_DOMAINS_MAX];
};

void iswi_rdma_domains_init(struct iswi_rdma_domains *domains);
/* One more user of the device. memory: what most WRITEs are sent from; others are copied. Blocks.
 */
int iswi_rdma_domain_join(struct iswi_rdma_domains *domains, const char *device, void *memory,
			  uint64_t bytes, struct iswi_rdma_domain **domain_out,
			  struct isw_error *error);
/* One more user of a domain that has some. */
void iswi_rdma_domain_hold(struct iswi_rdma_domain *domain);
/* One user less; the last closes the device. Accepts NULL. */
void iswi_rdma_domain_leave(struct iswi_rdma_domain *domain);
/* The device did not do what it was asked for. */
void iswi_rdma_domain_fail(struct iswi_rdma_domain *domain);
/* Marks the devices that the host is removing; returns how many are new. Blocks shortly. */
uint32_t iswi_rdma_domains_look(struct iswi_rdma_domains *domains);

/* ---- rdma_queue.c */
/* Where a lease's slots lie: written by the control plane, read by every submitter. */
struct iswi_rdma_places;
/* With one user. */
int iswi_rdma_places_make(uint32_t slots, struct iswi_rdma_places **places_out);
/* One user less; the last frees it. Accepts NULL. */
void iswi_rdma_places_leave(struct iswi_rdma_places *places);
/* Not while requests for the slot are under way. -EINVAL: there is no such slot. */
int iswi_rdma_places_set(struct iswi_rdma_places *places, uint32_t slot,
			 const struct isw_rdma_key *key);

/* ---- rdma.c */
struct iswi_rdma_config {
	struct iswi_rdma_domain *domain; /* the queue is one more user of it, ... */
	struct iswi_rdma_places *places; /* ... and of this */
	const struct iswi_verbs_choice *choice;
	uint64_t slab_bytes;
	uint32_t depth; /* requests posted at once; further ones wait in order */
	uint32_t request_bytes_max;
	const char *thread_name;
	const struct iswi_clock *clock; /* for request_ms_max; borrowed; NULL: monotonic */
};

#define ISWI_RDMA_DEPTH_MAX 4096

/*
 * A queue pair that is not connected yet; end_out is what the other end must know. Only connect and
 * destroy may be called on it. Blocking. -ENOMEM: see RLIMIT_MEMLOCK.
 */
int iswi_rdma_make(const struct iswi_rdma_config *config, struct iswi_queue **queue_out,
		   struct isw_rdma_end *end_out, struct isw_error *error);
/*
 * Connects it to the peer's, reads the probe's page to see that bytes really come, and starts the
 * queue. Blocking, connect_ms_max at most. *events is copied. -ETIMEDOUT: no answer; -EACCES: not
 * from who gave us the key. After an error it can only be destroyed.
 */
int iswi_rdma_connect(struct iswi_queue *queue, const struct isw_rdma_end *peer,
		      const struct isw_rdma_key *probe, uint32_t connect_ms_max,
		      uint32_t request_ms_max, const struct iswi_queue_events *events,
		      struct isw_error *error);

/* ---- rdma_offer.c */
struct iswi_rdma_offer_config {
	const isw_engine *engine; /* whose queues they will be; only compared */
	struct iswi_rdma_domains *domains;
	const char *host;
	void *memory; /* of the staging buffers */
	uint64_t memory_bytes;
	uint64_t slab_bytes;
	uint32_t request_bytes_max;
	uint32_t queues, slots;
};

/* The consumer's half of connections to a donor. Blocking. Errors as isw_rdma_offer_make. */
int iswi_rdma_offer_make(const struct iswi_rdma_offer_config *config, isw_rdma_offer **offer_out,
			 struct isw_error *error);

#endif
