/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The donor store's inside. store.c: the store as a whole. pool.c: slabs. lease.c: leases and their
 * slots. ticket.c: who may open a lease's connections. export.c: what the NBD server asks.
 * restore.c: what a predecessor left in the directory of slabs. rdma.h: the same memory by RDMA,
 * behind a table of functions; nothing else here knows it.
 *
 * A slab goes round: made (zeroed) → free → mapped in a lease's slot → dirty → zeroed → free.
 *
 * The fence. The page path takes no lock. A request raises the slot's refs FIRST and looks at its
 * word AFTER; unmap changes the word FIRST and waits for refs to be zero AFTER; all four are
 * sequentially consistent. So either the request sees the fence and lets go, or unmap sees the
 * request and waits. Only then does the slot's memory become somebody else's.
 *
 * The slot may then name another slab of the same device. A request that was sent before the fence
 * and arrives later would reach that slab. After DONE no such request exists. A slot that was taken
 * without DONE stays empty until the connections that could carry one have ended.
 */
#ifndef ISWI_STORE_H
#define ISWI_STORE_H

#include "store/slab_dir.h"
#include "store/slab_mem.h"
#include "util/util.h"
#include "wire/nbd_server.h"

#define ISWI_STORE_SLABS_MAX  65536u /* a bound on configuration, not a target */
#define ISWI_STORE_SLOTS_MAX  65536u /* of one lease */
#define ISWI_STORE_LEASES_MAX 65536u
#define ISWI_TICKET_BYTES     32u /* 128 bits in hexadecimal */
#define ISWI_STORE_NOTES_MAX  16u

enum iswi_slab_state {
	ISWI_SLAB_NONE, /* no memory */
	ISWI_SLAB_MAKING,
	ISWI_SLAB_FREE, /* zeroed */
	ISWI_SLAB_MAPPED,
	ISWI_SLAB_DIRTY,
	ISWI_SLAB_ZEROING,
	ISWI_SLAB_FREEING,
	ISWI_SLAB_ORPHAN, /* of a predecessor's lease that is not restored (yet) */
};

struct iswi_store_slab {
	struct iswi_slab_mem mem;
	enum iswi_slab_state state;
	struct iswi_slab_name name;
	bool pinning;
	bool pin_failed; /* once is enough */
	uint32_t holds;  /* calls that need its memory to stay: it is not freed meanwhile */
	uint32_t ready;  /* 1 << ISW_TRANSPORT_*: its next lease reaches it by that at once */
};

/* A slot's word: its generation above, its state in the lowest bits. */
#define ISWI_SLOT_EMPTY      0u
#define ISWI_SLOT_MAPPED     1u
#define ISWI_SLOT_FENCED     2u
#define ISWI_SLOT_STATE_MASK 3u
#define ISWI_SLOT_STATE_BITS 2

struct iswi_slot {
	/* Written under store->lock. Pair: refs, see the fence above. */
	_Alignas(64) atomic_uint_fast64_t word;
	/* Requests that use memory, or are about to see that they must not. Pair: word. */
	atomic_uint_fast32_t refs;
	uint32_t slab;
	uint32_t tag;
	char *memory;    /* changed only while no request can hold the slot */
	uint64_t barred; /* empty, but unusable until connections up to this number have ended
			  */
};

/* One connection bound to a lease. */
struct iswi_store_conn {
	struct iswi_lease *lease;
	struct iswi_nbd_conn *conn;
	uint64_t number; /* of the lease's, in their order, from 1 */
	uint32_t ticket; /* the number of the ticket that opened it */
	struct iswi_store_conn *next;
	struct iswi_store_conn **link; /* what points here */
};

/* All of it under store->lock. */
struct iswi_ticket {
	char text[ISW_TICKET_TEXT_BYTES];
	uint32_t uses;   /* how many are left; 0: there is no such ticket */
	uint64_t end_ns; /* of store->clock */
};

/*
 * A transport by which consumers reach slabs without the NBD server. Its own share of each lease is
 * made and freed with the lease. Every member is required; control threads call them, with no lock
 * of the store held unless it says otherwise.
 */
struct iswi_store_transport {
	const char *name;
	uint32_t kind; /* ISW_TRANSPORT_*: where its shares are in `parts` */
	/* The transport's share of a new store, whose slabs are there. -ENOMEM. Does not wait. */
	int (*create)(isw_store *store, void **part_out);
	/* Blocks: ends what it keeps for slabs. Every lease has ended. */
	void (*destroy)(isw_store *store);
	/* Adds its own. store->lock held; does not wait. */
	void (*stats)(isw_store *store, struct isw_store_stats *stats_out);

	/* The transport's share of a lease without anything in it. -ENOMEM. Does not wait. */
	int (*lease_create)(struct iswi_lease *lease, void **part_out);
	/* The share is empty, or the whole store is being destroyed. */
	void (*lease_destroy)(struct iswi_lease *lease);
	/* store->lock held; does not wait. */
	void (*lease_stats)(const struct iswi_lease *lease, struct isw_lease_stats *stats_out);
	/*
	 * Blocks: ends a lease's connections and, unless it is to pause only, all by which its
	 * slabs were reached. An error: some of that is still there, so nothing that it reached may
	 * become somebody else's.
	 */
	int (*lease_end)(struct iswi_lease *lease, bool pause);
	/*
	 * Blocks. After the slot was fenced: from now on nobody reaches its memory by this
	 * transport. forced: its owner may still be sending there, so all the lease's connections
	 * end. An error: as above.
	 */
	int (*slot_end)(struct iswi_lease *lease, uint32_t slot, bool forced);
	/* Blocks. Before the slab's memory goes: nobody else uses the slab. */
	void (*slab_end)(isw_store *store, uint32_t slab);
};

struct iswi_lease {
	uint64_t id;
	struct isw_store *store;
	void *parts[ISW_TRANSPORTS];             /* the transports' own */
	atomic_uint connections[ISW_TRANSPORTS]; /* likewise counted; relaxed: statistics */
	struct iswi_ticket tickets[ISW_TICKET_NUMBERS];
	uint64_t tickets_live; /* 1 << number: there is one */
	bool open;             /* tickets are given, and new connections with them are welcome */
	bool renewing;         /* one at a time */
	bool dying;            /* being destroyed: nobody else finds it */
	bool stuck;            /* likewise: a transport keeps something of it */
	uint32_t users;        /* calls that wait without the lock and return to the lease */
	uint64_t epoch;
	uint32_t slots_max;
	uint32_t slots_mapped;
	uint32_t slot_next; /* where to look for an empty slot first, so that slots are reused late
			     */
	uint32_t conn_count;
	uint64_t conn_last;
	struct iswi_store_conn *conns;
	struct iswi_nbd_counters counters;
	char *page; /* of a lease of no slots: see iswi_lease_alloc() */
	struct iswi_slot slots[];
};

/*
 * Locks, in the order in which they are taken:
 *   0. a transport's own: see its header.
 *   1. lock: everything here, in leases, and slot words for writing. Never held while memory is
 *      made, zeroed or freed, nor while anything is received or sent; held while a slab's file is
 *      renamed, which on a tmpfs waits for nothing.
 *   2. the server's own (inside iswi_nbd_server_*).
 * iswi_nbd_conn_shutdown takes none and is called with lock held: a connection lives as long as it
 * is in its lease's list.
 */
struct isw_store {
	struct isw_store_config config;
	pthread_mutex_t lock;
	/*
	 * Broadcast: a fenced slot's refs reached 0, a connection left, users changed, a transport
	 * has done with a slab.
	 */
	pthread_cond_t changed;
	const struct iswi_clock *clock; /* of tickets */
	struct iswi_nbd_server *server;
	const struct iswi_store_transport *const *transports; /* ends with NULL */
	void *parts[ISW_TRANSPORTS];                          /* the transports' own */
	struct iswi_slab_dir dir;
	struct iswi_store_slab *slabs; /* slabs_size places: slabs_max, or what was found */
	uint32_t slabs_size;
	struct iswi_lease **leases; /* leases_max places */
	uint64_t lease_last;
	uint64_t generation_last; /* of any slot: none is ever repeated, by a successor neither */
	uint64_t serial_last;
	struct isw_error notes[ISWI_STORE_NOTES_MAX];
	uint32_t note_count; /* all; those past the last are not kept */
};

extern const struct iswi_nbd_backend iswi_store_backend;

/* ---- pool.c */
/* store->lock held, or nobody else there: the next of *last, one that was never used. */
int iswi_store_number(struct isw_store *store, uint64_t *last, uint64_t *number_out);
/* Blocks: the transports' shares of the slab; nobody else uses it. */
void iswi_slab_end(struct isw_store *store, struct iswi_store_slab *slab);
/* store->lock held: nobody can reach the slab's memory from here on. */
void iswi_slab_retire(struct isw_store *store, struct iswi_store_slab *slab);

/* ---- restore.c */
/* Allocates store->slabs and takes over what is in store->dir. The store is not shared yet. */
int iswi_store_restore(struct isw_store *store, struct isw_error *error);

/* ---- ticket.c: store->lock held */
/* The lease that a ticket opens. NULL: there is no ticket of that name, or no longer. */
struct iswi_lease *iswi_ticket_find(struct isw_store *store, const char *name, size_t name_bytes,
				    uint32_t *number_out);
/* A connection is bound to the lease by the ticket. */
void iswi_ticket_use(struct iswi_lease *lease, uint32_t number);

/* ---- lease.c */
/* On the clock of store->changed. */
struct timespec iswi_store_deadline(uint32_t ms);
/*
 * A lease that nobody can connect to. NULL: no memory. Of no slots: its export is one page, which
 * slots[0] has as if it were mapped, and which counts for no slab.
 */
struct iswi_lease *iswi_lease_alloc(struct isw_store *store, uint32_t slots_max);
/* Nobody uses it; its transports have ended, or it is the store that is destroyed. */
void iswi_lease_free(struct iswi_lease *lease);
/* Of every transport, until one fails: see struct iswi_store_transport. */
int iswi_lease_end(struct iswi_lease *lease, bool pause);
/* store->lock held from here on. */
/* false: there are leases_max already. */
bool iswi_lease_insert(struct isw_store *store, struct iswi_lease *lease);
struct iswi_lease *iswi_lease_find(struct isw_store *store, uint64_t id);
/* One user more, one less. A lease with a user is not freed. */
void iswi_lease_enter(struct iswi_lease *lease);
void iswi_lease_leave(struct iswi_lease *lease);
/* No lock held; blocks: the rest of a destroyed lease at that place, if it is stuck. */
void iswi_lease_destroy_again(struct isw_store *store, uint32_t number);
/* Shuts down each of its connections, which then end. */
void iswi_lease_shut(struct iswi_lease *lease);
/* No request holds the slot. Its slab becomes dirty. */
void iswi_slot_empty(struct iswi_lease *lease, struct iswi_slot *slot);

#endif
