/* SPDX-License-Identifier: Apache-2.0 */
/* One process whose memory is far, as the front end sees it; and its requests. */
#ifndef ISWI_FAR_CLIENT_H
#define ISWI_FAR_CLIENT_H

#include "engine/request.h"
#include "frontend/far.h"

#define ISWI_FAR_BOUNCES ISWI_FAR_READS_MAX /* blocks that reads arrive in */

/*
 * A client's phase says which thread goes on with it: the control thread, or the one that hears
 * hellos. It changes under far->lock.
 */
enum iswi_far_phase {
	ISWI_FAR_UNUSED,
	ISWI_FAR_AWAITED,   /* it may come back: its process and its blocks are there */
	ISWI_FAR_BEGINNING, /* hello: its ring is made */
	ISWI_FAR_LIVE,      /* its requests are taken */
	ISWI_FAR_ENDING,    /* control: nothing more is taken; requests under way end */
	ISWI_FAR_LEFT,    /* its socket ended, which hello will look at, unless its process ends */
	ISWI_FAR_LEAVING, /* hello: while its memory lives it is awaited */
	ISWI_FAR_DISCARDING, /* control: its blocks, some at a time */
	ISWI_FAR_CLOSING     /* hello: gives back its ring, closes what it gave */
};

/* What an epoll event is about: the kind in the high byte, a generation, an index in 32 bits. */
enum iswi_far_about {
	ISWI_FAR_ABOUT_STOP,
	ISWI_FAR_ABOUT_TOLD,
	ISWI_FAR_ABOUT_JOB,
	ISWI_FAR_ABOUT_SOCK,
	ISWI_FAR_ABOUT_PROCESS,
	ISWI_FAR_ABOUT_BELL
};
#define ISWI_FAR_GENERATIONS (1u << 24)

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
	enum iswi_far_phase phase; /* far->lock, as the next two */
	bool returns;              /* ENDING: its socket ended; its memory may live */
	uint32_t generation;       /* so that an event is not taken for another life's */
	struct iswf_told told;     /* far->lock: as last seen in a ring */
	pthread_mutex_t look_lock[ISWF_KINDS]; /* held while its ring is looked at */
	bool live;                             /* both look_locks to change, one to read */
	struct iswf_ring *ring;                /* likewise */
	/* The thread's that goes on with it. The bells' counts are the client's: never read. */
	int sock, pidfd, uffd, bell[ISWF_KINDS];
	pthread_mutex_t leave_lock; /* a leaf: the next two; who leaves last still looks at both */
	uint32_t in_flight;
	bool ending; /* the control thread waits for the last one */
	struct far_request requests[ISWF_SLOTS];
	struct far_request discard; /* after its end */
	uint32_t discard_from;
	atomic_int discarded; /* its outcome: release by done, acquire by control. 1: under way */
};

struct far_job {
	int fd;      /* -1: none */
	uint64_t id; /* see struct iswi_far_kept_client */
};

/* Locks, outermost first: lock, look_lock, then the leaves: leave_lock, bounce_lock, the table's.
 */
struct far {
	struct isw_frontend frontend; /* first */
	isw_engine *engine;
	uint64_t offset; /* of the far range in the device, bytes */
	struct iswi_far_table table;
	pthread_mutex_t lock; /* nobody waits for a client, or a file of a client's, under it */
	struct far_client clients[ISWI_FAR_CLIENTS_MAX];
	struct far_job jobs[ISWI_FAR_JOBS_MAX]; /* lock */
	int control_epoll, hello_epoll, look_epoll[ISWF_KINDS];
	/* Eventfds of this process's alone, one for each thread: there is something to do. */
	int control_told, hello_told, look_told[ISWF_KINDS];
	atomic_bool stopping;
	int stop; /* eventfd, in every epoll; never read */
	pthread_t threads[2 + ISWF_KINDS];
	uint32_t threads_count;
	char *bounces;
	pthread_mutex_t bounce_lock;
	char *bounce_free[ISWI_FAR_BOUNCES];
	uint32_t bounces_free;
	bool bounce_wanted; /* look_told of reads, when one comes back */
};

/* far_request.c */
/* Looks at the slots of that kind and takes what is asked there. Its thread. */
void iswi_far_look(struct far_client *client, uint32_t kind);
/* Begins the discard of the next block of a client that ended; false: there is none left. */
bool iswi_far_discard_next(struct far_client *client);
/* Wakes the thread that the eventfd is of. Any thread, never waits. */
void iswi_far_tell(int eventfd);
/* Makes an eventfd of this process's unreadable again. */
void iswi_far_hear(int eventfd);

/* far_client.c */
/* EPOLL_CTL_ADD or _MOD. 0 or -errno. */
int iswi_far_watch(int epoll, int op, int fd, uint32_t events, uint64_t about);
uint64_t iswi_far_about(enum iswi_far_about about, const struct far_client *client);
void iswi_far_close(int *fd);
/* When the process started, in clock ticks since boot; 0: it cannot be told. */
uint64_t iswi_far_started(pid_t pid);
/*
 * Bells, which are edges, as nobody reads them here, and a ring, with no request in it. Its
 * descriptor, or -errno: then drop_ring takes back what was made.
 */
int iswi_far_make_link(struct far_client *client);
/* From now on its ring is looked at, or no longer. */
void iswi_far_set_live(struct far_client *client, bool live);
/* None of its requests is under way, and nobody who ended one still looks at it. */
bool iswi_far_is_idle(struct far_client *client);
/* May wait for who else uses that memory. */
void iswi_far_drop_ring(struct far_client *client);
/* far->lock is held by these: */
/* It has ended. returns: only its socket, as far as is known. */
void iswi_far_begin_end(struct far_client *client, bool returns);
void iswi_far_begin_discard(struct far_client *client);
/* The next step after its end: ms until there is another (0: at once), -1: somebody will tell. */
int iswi_far_step(struct far_client *client);
/* What its process says of itself, added to *told. */
void iswi_far_add_told(struct far_client *client, struct isw_far_told *told);
/* far->lock, about once a second: each process is told how many others of its job have much here.
 */
void iswi_far_tell_others(struct far *far);
/* What it says that it has here alone; any number, since it may lie. Far->lock. */
uint64_t iswi_far_pages_away(const struct far_client *client);
/* A process says why it has no agent. */
void iswi_far_count_off(struct far *far, uint32_t off);

/* far_hello.c: the thread that hears hellos, and closes what clients gave. */
void *iswi_far_hello_main(void *far);

#endif
