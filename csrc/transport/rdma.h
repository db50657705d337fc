/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport: a queue is one reliable connection, whose READs and WRITEs the donor's
 * processor does not see. A page's place there is an address and a key, by slot, told by the donor
 * over the control session.
 */
#ifndef ISWI_TRANSPORT_RDMA_H
#define ISWI_TRANSPORT_RDMA_H

#include "transport/transport.h"
#include "verbs/verbs.h"

/* A device opened for one engine: its protection domain, and the staging buffers registered there.
 */
struct iswi_rdma_domain;
/* memory: what most WRITEs are sent from, registered once; others are copied. NULL: all are. */
int iswi_rdma_domain_open(const struct iswi_verbs *verbs, const char *device, void *memory,
			  uint64_t bytes, struct iswi_rdma_domain **domain_out,
			  struct isw_error *error);
/* Every queue of it must be gone. Accepts NULL. */
void iswi_rdma_domain_close(struct iswi_rdma_domain *domain);

/* Whether the host is removing its device. Blocking, like reading a small file. */
bool iswi_rdma_domain_is_leaving(const struct iswi_rdma_domain *domain);

/* Where a lease's slots lie: written by the control plane, read by every submitter. */
struct iswi_rdma_places;
int iswi_rdma_places_make(uint32_t slots, struct iswi_rdma_places **places_out);
void iswi_rdma_places_free(struct iswi_rdma_places *places);
/* Not while requests for the slot are under way. -EINVAL: there is no such slot. */
int iswi_rdma_places_set(struct iswi_rdma_places *places, uint32_t slot,
			 const struct isw_rdma_key *key);

struct iswi_rdma_config {
	struct iswi_rdma_domain *domain;       /* borrowed, longer than the queue lives */
	const struct iswi_rdma_places *places; /* likewise */
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

#endif
