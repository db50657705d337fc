/* SPDX-License-Identifier: Apache-2.0 */
/* One process whose memory is far, as the front end sees it; and its requests. */
#ifndef ISWI_FAR_CLIENT_H
#define ISWI_FAR_CLIENT_H

#include "engine/request.h"
#include "frontend/far.h"

#define ISWI_FAR_BOUNCES ISWI_FAR_READS_MAX /* blocks that reads arrive in */

enum iswi_far_phase {
	ISWI_FAR_UNUSED,
	ISWI_FAR_AWAITED, /* of a predecessor's: it has not come back yet */
	ISWI_FAR_LIVE,
	ISWI_FAR_ENDING,    /* nothing more is taken; requests under way end */
	ISWI_FAR_DISCARDING /* its blocks, one by one */
};

struct far;
struct far_client;

struct far_request {
	struct iswi_req req;
	struct far_client *client;
	uint32_t slot, op, place;
	uint32_t bytes;
	bool whole; /* a discard of all of the block */
	char *bounce;
	/* Set by who looks at the slot, cleared after the answer. seq_cst, with the slot's state.
	 */
	atomic_bool taken;
};

struct far_client {
	struct far *far;
	uint32_t index;
	enum iswi_far_phase phase;             /* control thread */
	pthread_mutex_t look_lock[ISWF_KINDS]; /* held while its ring is looked at */
	bool live;                             /* both look_locks to change, one to read */
	struct iswf_ring *ring;                /* likewise */
	int sock, pidfd, uffd, bell[ISWF_KINDS];
	pthread_mutex_t leave_lock; /* a leaf: the next two; who leaves last still looks at both */
	uint32_t in_flight;
	bool ending; /* the control thread waits for the last one */
	struct far_request requests[ISWF_SLOTS];
	struct far_request discard; /* after its end */
	uint32_t discard_from;
	atomic_int discarded; /* its outcome: release by done, acquire by control. 1: under way */
};

struct far {
	struct isw_frontend frontend; /* first */
	isw_engine *engine;
	uint64_t offset; /* of the far range in the device, bytes */
	struct iswi_far_table table;
	struct far_client clients[ISWI_FAR_CLIENTS_MAX];
	int control_epoll, look_epoll[ISWF_KINDS];
	int told;  /* eventfd: the control thread has something to do */
	int again; /* eventfd: a bounce buffer came back, and somebody waits */
	atomic_bool stopping;
	int stop;                 /* eventfd, in every epoll; never read */
	atomic_uint clients_live; /* relaxed: for info */
	pthread_t threads[1 + ISWF_KINDS];
	uint32_t threads_count;
	char *bounces;
	pthread_mutex_t bounce_lock;
	char *bounce_free[ISWI_FAR_BOUNCES];
	uint32_t bounces_free;
	bool bounce_wanted;
};

/* far_request.c. Looks at the slots of that kind and takes what is asked there. Its thread. */
void iswi_far_look(struct far_client *client, uint32_t kind);
/* Begins the discard of the next block of a client that ended; false: there is none left. */
bool iswi_far_discard_next(struct far_client *client);
/* Wakes the control thread. Any thread, never waits. */
void iswi_far_tell(int eventfd);
/* Makes an eventfd unreadable again. */
void iswi_far_hear(int eventfd);

#endif
