/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libisw: the page path of Infiniswap.
 *
 * Every function returns 0 or a negative errno unless it says otherwise. Functions that take a
 * struct isw_error fill it in on failure with a sentence a user can act on; it may be NULL.
 * Handles are opaque: create fills an out pointer, destroy accepts NULL.
 *
 * The text between the two "cdef" markers is also what the Python binding is generated from, so it
 * stays within what cffi can parse: no preprocessor conditionals, constants as plain #define of
 * integers.
 */
#ifndef ISW_H
#define ISW_H

#include <stdint.h>

/* cdef begin */
#define ISW_PAGE_BYTES        4096
#define ISW_ERROR_TEXT_BYTES  256
#define ISW_TICKET_TEXT_BYTES 33
#define ISW_TICKET_NUMBERS    33
#define ISW_LATENCY_BUCKETS   256
#define ISW_NO_REMOTE         0xffffffff
#define ISW_RECORD_BYTES_MAX  512
#define ISW_RDMA_NAME_BYTES   64
#define ISW_RDMA_GIDS_MAX     32
#define ISW_SEAL_KEY_BYTES    32
#define ISW_SEALED_KEY_BYTES  60

struct isw_error {
	int code;       /* negative errno, 0 when unset */
	char text[256]; /* NUL-terminated */
};

/* ------------------------------------------------------------------ library */

#define ISW_FEATURE_URING 0x2
#define ISW_FEATURE_RDMA  0x8
#define ISW_FEATURE_SEAL  0x10

/* Which optional parts this build has: a mask of ISW_FEATURE_*. Front ends: isw_frontend_kind. */
uint32_t isw_features(void);
const char *isw_version(void);

/* ------------------------------------------------------------------- events */

/*
 * What C tells Python. Events sit in a bounded ring; its eventfd becomes readable when one is
 * added. When the ring is full the event is dropped and ISW_EVENT_OVERFLOW follows: the reader
 * must then re-read all state (isw_engine_slabs, isw_engine_remotes).
 */
#define ISW_EVENT_OVERFLOW         1
#define ISW_EVENT_REMOTE_DOWN      2 /* remote, code: slabs there are now SUSPENDED */
#define ISW_EVENT_SLAB_DRAINED     3 /* slab, remote, generation: unmapped, nothing in flight */
#define ISW_EVENT_SLAB_ERROR       4 /* ... and code: the donor refused a request */
#define ISW_EVENT_BACKUP_FAILING   5 /* code: a backup write failed; staging is kept, retried */
#define ISW_EVENT_BACKUP_RECOVERED 6
#define ISW_EVENT_BAD_PAGE         7 /* slab, value = page, code: wrong bytes, of remote if code is 1 */
#define ISW_EVENT_FRONTEND_DOWN    8  /* code: the front end ended without being asked */
#define ISW_EVENT_CONNECTION_LOST  9  /* of the front end nbd: see isw_frontend_info */
#define ISW_EVENT_USED             10 /* a page was asked for: see isw_engine_report_use */

struct isw_event {
	uint32_t kind;
	int32_t code;
	uint32_t remote;
	uint32_t slab;
	uint64_t generation;
	uint64_t value;
};

/* --------------------------------------------------------------- transports */

/* By what pages travel: csrc/transport on the consumer, csrc/store on the donor. */
#define ISW_TRANSPORT_TCP  0
#define ISW_TRANSPORT_RDMA 1
#define ISW_TRANSPORTS     2

/* --------------------------------------------------------------------- RDMA */

#define ISW_RDMA_LINK_OTHER      0
#define ISW_RDMA_LINK_INFINIBAND 1
#define ISW_RDMA_LINK_ETHERNET   2 /* RoCE */

#define ISW_RDMA_GID_OTHER   0 /* InfiniBand's own, or RoCE version 1 */
#define ISW_RDMA_GID_ROCE_V2 1

struct isw_rdma_gid {
	uint8_t raw[16]; /* of RoCE v2: an address, those of IPv4 mapped to IPv6 */
	uint32_t index;
	uint32_t type;
	uint32_t scope; /* of RoCE: the index of the interface that has it; 0: unknown */
};

/* A port of an RDMA device, as the host has it. */
struct isw_rdma_port {
	char device[64]; /* ISW_RDMA_NAME_BYTES */
	uint32_t port;
	uint32_t link;
	uint32_t active;
	uint32_t mtu_bytes;
	uint32_t lid;
	uint32_t qps_max; /* of the device, as the rest */
	uint32_t sends_max;
	uint32_t regions_max;
	uint32_t reads_max;
	uint64_t region_bytes_max;
	uint32_t gids; /* how many follow */
	struct isw_rdma_gid gid[32];
};

/*
 * Every port of this host: fills at most max, returns how many there are. -EOPNOTSUPP: this build
 * has no RDMA; -ENOENT: libibverbs is not installed; -ENOSYS: the kernel's modules are not loaded.
 * Blocking.
 */
int isw_rdma_ports(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error);
/*
 * Which of them leads to host, as a device or a donor would choose; *gid_out: of which address.
 * -ENODEV, -ENETDOWN, -EADDRNOTAVAIL with the reason, or as isw_rdma_ports. Blocking.
 */
int isw_rdma_choose(const char *host, struct isw_rdma_port *port_out, struct isw_rdma_gid *gid_out,
		    struct isw_error *error);

/* One end of a connection, as the other end must know it. */
struct isw_rdma_end {
	uint8_t gid[16];
	uint32_t lid; /* InfiniBand only */
	uint32_t link;
	uint32_t mtu_bytes;
	uint32_t reads_max;
	uint32_t number; /* of the queue pair */
	uint32_t psn;
	/* Not for the other end: the index of the interface that leads to a link-local gid. */
	uint32_t scope;
};

/* Memory that the other end may read, or write as well. */
struct isw_rdma_key {
	uint64_t address;
	uint32_t rkey;
};

/* -------------------------------------------------------------------- store */

/* The donor's side: slabs of pinned memory, lent under leases, served over NBD. */
typedef struct isw_store isw_store;

struct isw_store_config {
	uint64_t slab_bytes; /* multiple of ISW_PAGE_BYTES */
	uint32_t slabs_max;  /* pool limit */
	uint32_t leases_max;
	uint32_t connections_max; /* all leases together */
	uint32_t connections_per_lease_max;
	/* Of one host past GO, and as many before; 0: connections_max alone holds. */
	uint32_t connections_per_host_max;
	/*
	 * A connection must reach GO within this. Before GO it keeps no other one out: the longest
	 * waiting one ends when another one needs its place.
	 */
	uint32_t handshake_ms_max;
	/*
	 * A reply that moves no byte for this long ends the connection, and so does a request that
	 * is not there entirely this long after it began. Between requests it may be silent.
	 */
	uint32_t send_ms_max;
	/*
	 * Directory of a tmpfs that keeps the slabs when this process is gone; the store has it to
	 * itself. NULL: slabs are anonymous memory and end with the process. Copied.
	 */
	const char *slab_dir;
};

struct isw_store_stats {
	uint64_t slabs_free; /* zeroed, pinned, ready to map */
	uint64_t slabs_mapped;
	uint64_t slabs_dirty;    /* released, not zeroed yet */
	uint64_t slabs_unpinned; /* of all of the above: mlock was refused */
	uint64_t leases;
	uint64_t connections;
	uint64_t connections_refused;
	uint64_t read_requests;
	uint64_t write_requests;
	uint64_t read_bytes;
	uint64_t write_bytes;
	uint64_t request_errors;   /* well-formed requests answered with an error */
	uint64_t protocol_errors;  /* connections closed for what they sent */
	uint64_t rdma_connections; /* queue pairs */
	uint64_t rdma_regions;     /* slabs that are registered for a consumer */
	uint64_t rdma_ahead;       /* slabs that are registered for nobody yet */
	uint64_t rdma_failures;    /* registrations refused by the host or its device */
};

struct isw_lease_stats {
	uint64_t epoch;
	uint64_t slots_max;
	uint64_t slots_mapped;
	uint64_t connections;
	uint64_t read_bytes; /* over TCP, as write_bytes: of RDMA the donor sees nothing */
	uint64_t write_bytes;
	uint64_t rdma_connections;
};

int isw_store_create(const struct isw_store_config *config, isw_store **store_out,
		     struct isw_error *error);
/*
 * Closes every connection, waits for their threads, releases all memory; what lies in slab_dir
 * stays there as it is.
 */
void isw_store_destroy(isw_store *store);
/* Listens on host:port (port 0: any free one) and starts serving; *port_out is the bound port. */
int isw_store_listen(isw_store *store, const char *host, uint16_t port, uint16_t *port_out,
		     struct isw_error *error);

/* Blocking, any thread: adds one zeroed, pinned slab to the free pool. -ENOSPC at slabs_max. */
int isw_store_preallocate(isw_store *store, struct isw_error *error);
/*
 * Blocking, any thread: gives one slab that nobody has back to the host, a dirty one before a free
 * one. -ENOENT when there is neither.
 */
int isw_store_release_free(isw_store *store);
/* Blocking, any thread: zeroes one dirty slab into the free pool. -ENOENT when none is dirty. */
int isw_store_scrub(isw_store *store);
/* Blocking, any thread: pins one slab that was found in slab_dir. -ENOENT when all have been. */
int isw_store_pin(isw_store *store);

/*
 * What create found in slab_dir. Free and dirty slabs are in the pool at once. Those of a lease
 * come back with it when lease_restore names it; those of all other leases become dirty by
 * `restored`, which is called once, when every lease has been named.
 */
/* A file that was removed and not served, and why: index 0, 1, ...; -ENOENT past the last. */
int isw_store_note(isw_store *store, uint32_t index, struct isw_error *note_out);
/*
 * The lease with its slabs. Nobody can connect before it is renewed: until then it has no tickets.
 * -EINVAL: a number that was never given out; -EEXIST; -ENOSPC: leases_max; -ENOMEM.
 */
int isw_store_lease_restore(isw_store *store, uint64_t lease, uint32_t slots_max, uint64_t epoch);
void isw_store_restored(isw_store *store);

struct isw_slot_info {
	uint64_t generation;
	uint32_t slot;
	uint32_t tag; /* as given to isw_store_map */
};
/* The first mapped slot from `slot` on. -ENOENT: none, or no such lease. */
int isw_store_lease_slot(isw_store *store, uint64_t lease, uint32_t slot,
			 struct isw_slot_info *info_out);

/*
 * A lease is one export: slots_max slab slots, all empty, reachable with tickets. With no slot it
 * is one page that takes no slab, to try the data port with; it cannot be restored. lease_out is
 * never reused during the life of the store or, with slab_dir, of that directory.
 */
int isw_store_lease_create(isw_store *store, uint32_t slots_max, uint64_t *lease_out,
			   struct isw_error *error);
/*
 * Fences: shuts the lease's connections down, waits until none is left (so that no late write
 * can land). Every ticket is dead. -ETIMEDOUT: no ticket is given until a renewal succeeds.
 */
int isw_store_lease_renew(isw_store *store, uint64_t lease, uint32_t wait_ms_max);

/* A ticket: the name of the export for those who open one connection of a lease. */
struct isw_ticket_config {
	uint32_t number;  /* which connection: below ISW_TICKET_NUMBERS */
	uint32_t uses;    /* how many connections it opens: 1, more for programs that need more */
	uint32_t good_ms; /* 0: until it is used up, replaced or ended */
	uint32_t wait_ms_max;
};
/*
 * Gives a ticket. The lease's earlier one of the same number is dead, and connections that it has
 * opened are shut down; blocks until they have ended, without any it does not wait. ticket_out
 * takes ISW_TICKET_TEXT_BYTES. -ETIMEDOUT: they have not ended in wait_ms_max. -EBUSY: the lease is
 * being renewed, or has to be. -ENOENT: no such lease.
 */
int isw_store_ticket(isw_store *store, uint64_t lease, const struct isw_ticket_config *config,
		     char *ticket_out);
/* Ends a ticket, and shuts down the connections that it has opened. Does not wait. */
int isw_store_ticket_end(isw_store *store, uint64_t lease, uint32_t number);
/* Fences and releases every slot; the slabs become dirty. */
int isw_store_lease_destroy(isw_store *store, uint64_t lease);
int isw_store_lease_stats(isw_store *store, uint64_t lease, struct isw_lease_stats *stats_out);

/*
 * Puts a free slab into an empty slot; tag is the caller's, kept with it. -ENOENT: no free slab;
 * -ENOSPC: no empty slot; -EAGAIN: none but those taken by force (see unmap): the lease's
 * connections are shut down, which frees them.
 */
int isw_store_map(isw_store *store, uint64_t lease, uint32_t tag, uint32_t *slot_out,
		  uint64_t *generation_out);
/*
 * Fences one slot and waits for the requests that hold it (after DONE there are none); past
 * wait_ms_max the lease's connections are shut down, which ends them. The slab becomes dirty.
 * wait_ms_max 0: by force, its owner has not said DONE, so requests for it may still be on their
 * way: the slot is not used again before the connections of now have ended, and those by RDMA are
 * ended here. -ESTALE: the slot holds another generation.
 */
int isw_store_unmap(isw_store *store, uint64_t lease, uint32_t slot, uint64_t generation,
		    uint32_t wait_ms_max);
void isw_store_stats(isw_store *store, struct isw_store_stats *stats_out);

/*
 * RDMA beside a lease's TCP connections, for as long as its epoch: connects a queue pair to each of
 * the consumer's ends, replaces earlier ones, and returns its own ends. probe_out: a page of that
 * lease's that can only be read. renew and rdma_pause end the queue pairs; what is registered stays
 * so for the next of the lease's, and nobody reaches it meanwhile. destroy and rdma_close end that,
 * too. Blocking. Errors as isw_rdma_choose, and: -ENOENT: no such lease; -EBUSY: it is being
 * renewed, or what is left of its former connections cannot be ended; -EINVAL: what the consumer
 * says cannot be.
 */
#define ISW_RDMA_QUEUES_MAX 16
int isw_store_rdma_open(isw_store *store, uint64_t lease, const struct isw_rdma_end *peers,
			uint32_t count, struct isw_rdma_end *ends_out,
			struct isw_rdma_key *probe_out, struct isw_error *error);
/*
 * Ends the queue pairs, then every key; where there were any, the lease's TCP connections, too: a
 * consumer hears of it. -ENOENT. Blocking.
 */
int isw_store_rdma_close(isw_store *store, uint64_t lease);
int isw_store_rdma_pause(isw_store *store, uint64_t lease);
/*
 * Registers a mapped slot's slab for its lease alone, or says what it is registered as. The key
 * dies with unmap, before the slab is anybody else's, and with rdma_close. Blocking, for as long as
 * it takes to look up a slab's pages: not where it was registered ahead. -ENOTCONN: there is no
 * rdma_open; -ESTALE: the slot holds another generation; -ENOMEM: see RLIMIT_MEMLOCK. at_hand: only
 * what takes no time; -EAGAIN: this would.
 */
int isw_store_rdma_key(isw_store *store, uint64_t lease, uint32_t slot, uint64_t generation,
		       uint32_t at_hand, struct isw_rdma_key *key_out, struct isw_error *error);
/*
 * Registers one slab ahead, for nobody, with the device that leases use, or else the first that has
 * an active port: -ENOENT: all are. To be called in the background until then, and again when slabs
 * were made or came back. Blocking. Errors of ports and of registration.
 */
int isw_store_rdma_ahead(isw_store *store, struct isw_error *error);
/* Ends what is registered ahead. Blocking. */
void isw_store_rdma_ahead_end(isw_store *store);
/*
 * Lets go of each RDMA device that the host is removing: ends all that is connected and registered
 * by it, and closes it; its consumers come back over TCP. A driver that cannot take its device from
 * a program (soft-RoCE's) lets the kernel wait for that. To be called every now and then. Blocking.
 * Returns how many go since this call.
 */
uint32_t isw_store_rdma_let_go(isw_store *store);

/* --------------------------------------------------------------------- keys */

/*
 * A device's key, with which the engine seals its pages (AES-256-GCM). It lies in memory of its own
 * that swap space and core files do not get, and is known by a descriptor of that memory, which can
 * be handed to another process. The key itself never leaves the library in the clear.
 */
/* A new, random key. The caller closes the descriptor. */
int isw_seal_key_make(int32_t *fd_out, struct isw_error *error);
/*
 * The key, sealed with another one of ISW_SEAL_KEY_BYTES (a host's), to be kept on disk:
 * sealed_out takes ISW_SEALED_KEY_BYTES. -EBADF: not such a descriptor.
 */
int isw_seal_key_save(int32_t fd, const uint8_t *host_key, uint8_t *sealed_out,
		      struct isw_error *error);
/* The reverse. -EKEYREJECTED: sealed with another host key, or altered. */
int isw_seal_key_load(const uint8_t *sealed, const uint8_t *host_key, int32_t *fd_out,
		      struct isw_error *error);
/* Overwrites the key for everybody who has the descriptor. The caller still closes it. */
int isw_seal_key_forget(int32_t fd);
/*
 * Which library seals pages on this host: the fastest one that passes its self-test. -ENOTSUP: this
 * build or this host has none, and the error says what to install. Blocking, some milliseconds.
 */
int isw_seal_check(const char **name_out, struct isw_error *error);

/* ------------------------------------------------------------------- engine */

/* The consumer's side: one device. */
typedef struct isw_engine isw_engine;

#define ISW_ENGINE_NO_BACKUP  0x1  /* --backup none: the loss of a donor loses data */
#define ISW_ENGINE_STANDBY    0x2  /* waits for isw_engine_take_over */
#define ISW_ENGINE_READ_AHEAD 0x4  /* reads from donors what will be asked for next */
#define ISW_ENGINE_QUICKER    0x8  /* reads from the backup what that has sooner than a donor */
#define ISW_ENGINE_SEAL       0x10 /* pages leave this process only sealed: see seal_key_fd */

struct isw_engine_config {
	uint64_t size_bytes; /* multiple of ISW_PAGE_BYTES */
	uint64_t slab_bytes;
	uint32_t staging_pages;
	uint32_t request_bytes_max; /* largest READ or WRITE */
	uint32_t requests_max;      /* in flight at once, far ones apart */
	uint32_t remotes_max;       /* donors at once */
	uint32_t backup_write_bytes_max;
	uint32_t backup_writers; /* threads */
	uint32_t backup_readers;
	/*
	 * A READ that takes much longer than its donor's recent reads did, and at least this long,
	 * is also read from the backup, if the backup has its pages. 0 turns that off.
	 */
	uint32_t hedge_us_min;
	/*
	 * So much at the device's end is not for block devices; the front end far has of it what
	 * lies behind the next slab's border. Pages.
	 */
	uint64_t far_bytes;
	uint32_t flags;
	/*
	 * The state file: borrowed until create returns, and made new, unless this is a standby.
	 * It outlives the process, however that ends; it should be in memory (tmpfs), and nobody
	 * else should be able to read it. -1: anonymous memory, which ends with the process.
	 */
	int32_t state_fd;
	/*
	 * With ISW_ENGINE_SEAL: the device's key, borrowed until create returns. A standby is made
	 * with its predecessor's. Donors, backup and state file then get sealed pages only.
	 */
	int32_t seal_key_fd;
};

/*
 * backup_path: a regular file (created, preallocated) or a block device; NULL with
 * ISW_ENGINE_NO_BACKUP. Takes flock(LOCK_EX) on it before any I/O: -EWOULDBLOCK when another
 * process has it, or the state file.
 *
 * With ISW_ENGINE_STANDBY (and then without a backup_path) it has memory and threads, but changes
 * neither the state file nor the backup, which are another process's. Until isw_engine_take_over
 * only the functions on events, statistics and destroy may be called.
 */
int isw_engine_create(const struct isw_engine_config *config, const char *backup_path,
		      isw_engine **engine_out, struct isw_error *error);
/*
 * Goes on where the process that had the state file was killed, at whatever instruction. Waits up
 * to ten seconds each for the locks of state file and backup, which are free when that process's
 * last thread and its last write have ended: -EWOULDBLOCK. A state file that does not fit is an
 * error as from isw_state_read; then nothing has changed, and the engine is still a standby.
 *
 * Afterwards staged pages are staged and on their way to the backup, every slab that had a donor is
 * SUSPENDED (except those that were draining, which are drained and reported), and every remote
 * that has a record or a slab is down: isw_remote_reconnect and isw_slab_resume bring them back,
 * when the donor has fenced the old connections. Statistics begin at zero. Blocking.
 */
int isw_engine_take_over(isw_engine *engine, const char *backup_path, struct isw_error *error);

/* What a state file says of its device, read without an engine. */
struct isw_state_info {
	uint64_t size_bytes;
	uint64_t slab_bytes;
	uint64_t file_bytes;
	uint32_t staging_pages;
	uint32_t remotes_max;
	uint32_t no_backup;
	uint32_t version; /* of its layout */
	uint32_t ready;   /* a standby may take over */
};
/*
 * Looks at a state file's header; nothing changes. -ENODATA: it is empty or zeros; -EBADMSG:
 * damaged, truncated, or no state file; -EPROTONOSUPPORT: of another version; -ESTALE: from before
 * the host was booted.
 */
int isw_state_read(int32_t fd, struct isw_state_info *info_out, struct isw_error *error);
/* Every front end must be gone. Requests still in flight on remotes are ended first. */
void isw_engine_destroy(isw_engine *engine);

/* Borrowed: the descriptor lives as long as the engine. */
int isw_engine_eventfd(isw_engine *engine);
/* Returns how many events were stored, at most max. Never blocks. */
int isw_engine_events(isw_engine *engine, struct isw_event *events_out, uint32_t max);
/*
 * Reports ISW_EVENT_USED once, with the next read or write; one that is being submitted at this
 * moment may not count. Never blocks.
 */
void isw_engine_report_use(isw_engine *engine);

/*
 * The consumer's half of RDMA connections to a donor, to be told to it. isw_remote_connect and
 * isw_remote_reconnect take it, also when they fail; else it is to be destroyed, before the engine
 * is. slots: of the lease. Errors as isw_rdma_choose, and -ENOMEM: see RLIMIT_MEMLOCK. Blocking.
 */
typedef struct isw_rdma_offer isw_rdma_offer;
int isw_rdma_offer_make(isw_engine *engine, const char *host, uint32_t queues, uint32_t slots,
			isw_rdma_offer **offer_out, struct isw_error *error);
void isw_rdma_offer_end(const isw_rdma_offer *offer, uint32_t queue, struct isw_rdma_end *end_out);
void isw_rdma_offer_destroy(isw_rdma_offer *offer);
/*
 * As isw_store_rdma_let_go: remotes with such a device are reported down, and it is closed when
 * they have been reconnected without it or destroyed.
 */
uint32_t isw_rdma_let_go(isw_engine *engine);

/*
 * A remote is a set of connections to one lease on one donor: NBD, or RDMA and one NBD connection
 * by which each end sees the other's death. Blocking, bounded by connect_ms_max; not for an event
 * loop's thread.
 */
struct isw_remote_config {
	const char *host; /* copied */
	uint16_t port;
	/* One for each TCP connection: `queues` of them, or one beside RDMA. Borrowed. */
	const char *const *tickets;
	uint32_t queues; /* connections, 1..16 */
	uint32_t connect_ms_max;
	uint32_t request_ms_max; /* per-request deadline; past it the remote is declared down */
	uint64_t export_bytes;   /* what the donor must announce at least */
	/* NULL: TCP. Else taken; and what the donor answered, an end for each queue: borrowed. */
	isw_rdma_offer *rdma;
	const struct isw_rdma_end *rdma_peers;
	struct isw_rdma_key rdma_probe;
};
int isw_remote_connect(isw_engine *engine, const struct isw_remote_config *config,
		       uint32_t *remote_out, struct isw_error *error);
/* Of a remote with RDMA: where a slot's slab lies, before it is mapped or resumed. -ENOTCONN. */
int isw_remote_slot_key(isw_engine *engine, uint32_t remote, uint32_t slot,
			const struct isw_rdma_key *key);
/* After REMOTE_DOWN and a renewed lease: new connections for the same remote. */
int isw_remote_reconnect(isw_engine *engine, uint32_t remote,
			 const struct isw_remote_config *config, struct isw_error *error);
/* Declares it down on purpose; REMOTE_DOWN follows as for a failure. */
int isw_remote_shutdown(isw_engine *engine, uint32_t remote);
/* -EBUSY while a slab is mapped or suspended there. */
int isw_remote_destroy(isw_engine *engine, uint32_t remote);
/*
 * A remote's record: whatever a successor needs to know to get its lease back. To be set before a
 * slab is mapped there; goes with the remote. A process killed while setting it leaves the old
 * record or the new one. -E2BIG: more than ISW_RECORD_BYTES_MAX.
 */
int isw_remote_record_set(isw_engine *engine, uint32_t remote, const void *data, uint32_t bytes);
/* data_out has room for ISW_RECORD_BYTES_MAX. Returns the record's length, 0 when there is none. */
int isw_remote_record(isw_engine *engine, uint32_t remote, void *data_out);

/* Slab states. */
#define ISW_SLAB_UNMAPPED  0
#define ISW_SLAB_MAPPED    1
#define ISW_SLAB_SUSPENDED 2 /* the remote is down; nothing is sent, bits are kept */
#define ISW_SLAB_DRAINING  3 /* being unmapped: nothing new is sent */

/* generation: the donor's, from the map answer. -EBUSY unless UNMAPPED. */
int isw_slab_map(isw_engine *engine, uint32_t slab, uint32_t remote, uint32_t slot,
		 uint64_t generation);
/*
 * From MAPPED or SUSPENDED: nothing more is sent there, the requests in flight end, its
 * remote-valid bits are cleared, then ISW_EVENT_SLAB_DRAINED. -ESTALE: another generation.
 */
int isw_slab_unmap(isw_engine *engine, uint32_t slab, uint32_t remote, uint64_t generation);
/* SUSPENDED → MAPPED, after isw_remote_reconnect on a lease whose epoch was renewed. */
int isw_slab_resume(isw_engine *engine, uint32_t slab, uint32_t remote, uint64_t generation);

/*
 * Begins a migration: maps the slab to one more donor, to which writes go from then on. The source,
 * where it was until now, keeps what it has, and each page is read where it was valid last. The
 * source may be unmapped at any time; what is then still only there is left to the backup. -EBUSY:
 * it migrates already; -EINVAL: it is neither MAPPED nor SUSPENDED.
 */
int isw_slab_migrate(isw_engine *engine, uint32_t slab, uint32_t remote, uint32_t slot,
		     uint64_t generation);
/*
 * Copies what is valid at a slab's source to where the slab is now, in the background, as fast as
 * the copies' share of the staging buffers allows, one slab of the engine at a time. To be called
 * again from time to time: copies that found no buffer do not go on by themselves. `again`: from
 * the slab's first page, for what a pass has left over; the first pass to a new place begins there
 * anyway. It stops when a donor refuses. Any thread, never waits. Returns 1, or 0 when the pass has
 * come to the slab's end: isw_slab_pages_at says whether it left anything. -ESTALE: not MAPPED at
 * both ends.
 */
int isw_slab_pull(isw_engine *engine, uint32_t slab, uint64_t generation, uint32_t again);
/*
 * How many pages are valid at that donor. Returns 0, or 1 while that may still become more: the
 * slab is written there, or requests are in flight. -ESTALE: it is not there.
 */
int isw_slab_pages_at(isw_engine *engine, uint32_t slab, uint32_t remote, uint64_t generation,
		      uint32_t *pages_out);

/*
 * Begins to copy pages that the backup has and the slab's donor lacks to the donor: at most
 * pages_max, from page `first` of the slab on. Any thread, never waits: the copies go on in the
 * background, each ends as one of pages_copied or pages_copy_dropped. Returns how many were begun,
 * also 0, fewer than asked for while copies have their share: 256 pages, and staging buffers only
 * as long as half of all are free. *next_out: the page to go on with, the pages of a slab at its
 * end. Pages with a write under way are passed over: one more pass finds those that its donor did
 * not get. -ESTALE: the slab is not MAPPED, or has another generation (*next_out is left alone).
 * Without a backup there is nothing to copy.
 */
int isw_slab_fill(isw_engine *engine, uint32_t slab, uint64_t generation, uint32_t first,
		  uint32_t pages_max, uint32_t *next_out);

struct isw_slab_info {
	uint32_t state;
	uint32_t remote; /* ISW_NO_REMOTE when unmapped */
	uint32_t slot;
	uint32_t in_flight;
	uint64_t generation;
	/* While it migrates: where it comes from; else UNMAPPED. */
	uint32_t source_state;
	uint32_t source_remote;
	uint32_t source_slot;
	uint32_t source_in_flight;
	uint64_t source_generation;
	uint64_t page_ins; /* since the start, for the activity average */
	uint64_t page_outs;
	uint64_t remote_valid_pages;
};
/* Fills at most max entries from slab `first`; returns how many. Never blocks. */
int isw_engine_slabs(isw_engine *engine, uint32_t first, uint32_t max,
		     struct isw_slab_info *slabs_out);

struct isw_remote_info {
	uint32_t state; /* 0 unused, 1 up, 2 down */
	uint32_t queues;
	/* What it answered well, copies too, since the number is this donor's. */
	uint64_t read_pages;
	uint64_t write_pages;
	uint64_t rdma_read_pages; /* of these, by RDMA */
	uint64_t rdma_write_pages;
	uint64_t errors;
	uint64_t in_flight;
	uint64_t
		read_tail_ns; /* about 99 of 100 reads of late were answered within this; 0: none */
	uint32_t rdma;        /* pages go by RDMA */
	uint64_t expected_ns; /* what a read of one page would take now; 0: no idea */
};
int isw_engine_remotes(isw_engine *engine, uint32_t max, struct isw_remote_info *remotes_out);

struct isw_engine_stats {
	uint64_t read_requests;
	uint64_t read_requests_waited; /* ended; for a donor or the disk: others were ready here */
	uint64_t write_requests;
	uint64_t trim_requests;
	uint64_t zero_requests;
	uint64_t flush_requests;
	uint64_t requests_in_flight;
	uint64_t requests_failed; /* answered with an error */
	uint64_t pages_in;        /* the sum of the next four */
	uint64_t pages_in_remote;
	uint64_t pages_in_staging;
	uint64_t pages_in_backup;
	uint64_t pages_in_zero; /* never written or trimmed */
	uint64_t pages_out;
	uint64_t pages_out_remote;      /* acknowledged by a donor */
	uint64_t pages_out_backup;      /* written to the backup */
	uint64_t pages_out_superseded;  /* backup writes saved by newer data */
	uint64_t backup_write_requests; /* after merging */
	uint64_t fallback_unmapped;     /* page-ins from the backup: slab had no donor or ... */
	uint64_t fallback_suspended;    /* ... its donor was unreachable */
	uint64_t fallback_invalid;      /* ... slab mapped, page not (yet) remote-valid */
	uint64_t fallback_error;        /* ... the donor failed or its bytes did */
	uint64_t fallback_slow;         /* ... the donor took too long, or keeps others waiting */
	uint64_t fallback_quicker;      /* ... the backup was expected to be quicker */
	uint64_t fallback_measured;     /* ... it was not, but its speed was to be measured */
	uint64_t remote_errors;
	uint64_t crc_errors_remote;
	uint64_t crc_errors_backup;
	uint64_t backup_errors;
	uint64_t backup_failing; /* pages that wait for a retry */
	uint64_t staging_pages;
	uint64_t staging_pages_used;
	uint64_t staging_waits;      /* writes that had to wait for a free staging buffer */
	uint64_t pages_copied;       /* by isw_slab_fill: acknowledged by a donor */
	uint64_t pages_migrated;     /* by isw_slab_pull */
	uint64_t pages_copy_dropped; /* begun by either, but overtaken by a write or failed */
	uint64_t hedged_reads;       /* slow reads that were sent to the other source, too ... */
	uint64_t hedged_wins;        /* ... which was faster */
	uint64_t pages_ahead;        /* read ahead of their requests ... */
	uint64_t pages_ahead_used;   /* ... and asked for then */
	uint64_t pages_ahead_wasted; /* ... or given up: outdated, or asked for by nobody */
	uint64_t events_dropped;
	/* What a read of one page from the backup would take now; 0: no idea. */
	uint64_t backup_expected_ns;
	/* Request latency at the front end, log-linear: see isw_latency_bucket_ns. */
	uint64_t read_latency[256];
	uint64_t waited_read_latency[256]; /* of read_requests_waited */
	uint64_t write_latency[256];
	/* ... and of each transfer of one page or more, copies too. */
	uint64_t remote_read_latency[256];
	uint64_t remote_write_latency[256];
	uint64_t backup_read_latency[256];
	uint64_t backup_write_latency[256];
};
void isw_engine_stats(isw_engine *engine, struct isw_engine_stats *stats_out);
/* Upper bound of a bucket in nanoseconds. */
uint64_t isw_latency_bucket_ns(uint32_t bucket);

/*
 * Waits until no page is staged that the backup lacks, then fdatasync: the contents are then all
 * on the backup. -ETIMEDOUT. Blocking; used before the page tables are saved.
 */
int isw_engine_settle(isw_engine *engine, uint32_t wait_ms_max);
/*
 * Saves or loads which pages the backup holds, with their checksums or seals (for a device that is
 * stopped and started again). Load: right after create, before any front end. -EBADMSG: not such
 * a file, damaged, or of another device or size; -EKEYREJECTED: of a sealed device with another
 * key, or altered; -EPROTONOSUPPORT: sealed where this engine is not, or the reverse.
 */
int isw_engine_save_tables(isw_engine *engine, const char *path, struct isw_error *error);
int isw_engine_load_tables(isw_engine *engine, const char *path, struct isw_error *error);
/*
 * Seals pages of earlier starts again until there is room for one more start, through the engine's
 * own reads and writes. After load_tables, before any front end. Blocking, as long as it takes to
 * read and write these pages; does nothing for the first starts. Returns how many of them do not
 * open and have no other copy: reading these is an error for good, until they are written.
 * -EIO: the disk does not read pages, of any earlier start.
 */
int isw_engine_seal_anew(isw_engine *engine, struct isw_error *error);
/*
 * To be called now and then: once a key has sealed 2^32 pages, begins with another one, derived
 * like the first. Control thread, never blocks. Returns 1 when it did, 0 when there was no need,
 * -ENOSPC: pages of all former keys are still in use, the present one goes on. One place is always
 * left, for the next start.
 */
int isw_engine_seal_tend(isw_engine *engine);

/* ---------------------------------------------------------------- front ends */

typedef struct isw_frontend isw_frontend;

/* Bytes of a note that a front end leaves its successor, at most. */
#define ISW_FRONTEND_NOTE_BYTES_MAX 256

/*
 * The kinds of front ends, one by one; NULL after the last. *missing_out: NULL, or why this build
 * lacks that kind, and what to install.
 */
const char *isw_frontend_kind(uint32_t index, const char **missing_out);

/* What a front end is made with. Each kind names the members that it reads; the others are 0. */
struct isw_frontend_config {
	const char *path;  /* fuse: of the mount point; nbd-socket: of the socket. Copied */
	uint64_t identity; /* ublk: kept by the kernel, which uses device numbers again */
	uint32_t queues;   /* ublk: 0: chosen */
	uint32_t request_bytes_max; /* nbd: larger requests are refused */
	/*
	 * far: who has which block, in memory that outlives this process; empty of a new device.
	 * With an empty one all that was in the far range is discarded. -EINVAL: of another
	 * device; -EUCLEAN: damaged.
	 */
	int32_t table_fd;
	/* isw_frontend_prepare: of the predecessor's. */
	uint32_t device_id;  /* ublk */
	uint32_t note_bytes; /* fuse: what isw_frontend_handover returned */
	const void *note;    /* copied */
};

/*
 * What the processes of far memory's jobs say of themselves: of those that live and those that
 * ended, summed up. For people; nothing depends on it.
 */
struct isw_far_told {
	uint64_t pages_out, pages_in;
	uint64_t small_fetches; /* of a part of a block; fetches: of all of it */
	uint64_t fetches;
	uint64_t fetch_wait_ns; /* threads waited for pages */
	uint64_t room_waits;    /* threads waited until others' pages had left */
	uint64_t room_wait_ns;
	uint64_t pages_lost; /* their bytes are gone for good: SIGBUS */
	uint64_t pauses;     /* of evicting, for the kernel to swap instead */
	uint64_t pause_ns;
	/* Pages that are the kernel's again, by reason: see enum iswf_why (csrc/far/ring.h). */
	uint64_t back_fork, back_locked, back_protected, back_policy, back_fixed, back_moved;
	uint64_t back_advice, back_ended, back_pinned, back_stack;
	/* Processes whose memory is never far, by reason: see enum iswf_off. */
	uint64_t off_kernel, off_permission, off_cgroup, off_addresses, off_locked, off_threads;
	uint64_t off_resources, off_device, off_sandbox, off_version;
};

/* What is known of a front end. Each kind names the members that it sets; the others are 0. */
struct isw_frontend_info {
	uint64_t size_bytes;   /* all */
	uint32_t requests_max; /* all: in flight at once */
	uint32_t device_id;    /* ublk: N of /dev/ublkbN */
	/*
	 * nbd: of those served, how many have not ended. far: processes with memory there; while
	 * it is not 0, to destroy the front end takes that memory from them, unless a successor
	 * serves the job's socket.
	 */
	uint32_t connections;
	uint64_t used_bytes;     /* far: in blocks that somebody has */
	uint64_t away_bytes;     /* far: of that, what is nowhere else, as the processes say */
	struct isw_far_told far; /* far */
};

/*
 * Starts a front end. -ENOSYS: this build lacks that kind, and `error` says what to install.
 * Blocking. The kinds:
 *   fuse        mounts a file system with one file, `disk`
 *   nbd         serves the kernel's client, on sockets given one by one (isw_frontend_serve). When
 *               one ends: ISW_EVENT_CONNECTION_LOST. It has buffers for requests_max requests
 *   nbd-socket  listens on a Unix socket (default export)
 *   far         serves the large memory of jobs' processes, on a socket for each job
 *               (isw_frontend_serve); beside one of the others
 *   ublk        makes the block device /dev/ublkbN. It outlives this process when that dies:
 *               requests wait for a successor
 */
int isw_frontend_start(isw_engine *engine, const char *kind,
		       const struct isw_frontend_config *config, isw_frontend **frontend_out,
		       struct isw_error *error);
/*
 * For a successor, while its predecessor still serves: makes all that needs memory. Nothing is
 * served, and destroy leaves the predecessor's device as it is. Kinds fuse and ublk; ublk also
 * looks whether the device is one for this engine (-EINVAL), there (-ENODEV) and the one meant
 * (-ESTALE).
 */
int isw_frontend_prepare(isw_engine *engine, const char *kind,
			 const struct isw_frontend_config *config, isw_frontend **frontend_out,
			 struct isw_error *error);
/*
 * Kind fuse: what a successor needs: the connection's descriptor (the front end's; copies keep the
 * mount alive while nobody serves it) and a note, of which note_out takes
 * ISW_FRONTEND_NOTE_BYTES_MAX bytes. Returns the note's length. -EOPNOTSUPP with the reason: this
 * kernel or libfuse cannot hand a connection on. Any thread, never waits.
 */
int isw_frontend_handover(isw_frontend *frontend, int32_t *fd_out, void *note_out,
			  struct isw_error *error);
/*
 * Serves one more connection, of which it makes a copy. nbd: a stream socket in transmission, whose
 * other end the kernel has; any thread. far: one end of a job's SEQPACKET socket pair, before the
 * job starts, or that of a predecessor that is dead, whose clients come back; any thread. -ENOSPC:
 * too many jobs at once. fuse, prepared: the connection of a predecessor that is dead, whose
 * unanswered requests the kernel sends again; after an error the front end can only be destroyed.
 */
int isw_frontend_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error);
/*
 * Kind ublk, prepared: takes the device of a predecessor over once that is dead, and serves it,
 * what it had accepted and not answered included. Blocking. -EBUSY: after wait_ms_max it is still
 * not dead; to be called again. -ENODEV: the device is gone, or somebody has stopped it, so that
 * nobody can ever serve it again. After any other error the front end can only be destroyed, which
 * leaves the device as it is.
 */
int isw_frontend_take_over(isw_frontend *frontend, uint32_t wait_ms_max, struct isw_error *error);
/*
 * Kind ublk: its io_urings, one for each queue, from their making until isw_frontend_destroy:
 * returns how many there are (0 for other kinds) and writes at most `max`. Somebody who outlives
 * this process should have copies until this process is dead: Linux 6.7 to 6.14.5 free a ring that
 * dies with its process under requests that were being handed over, and panic (CVE-2025-37906).
 */
int isw_frontend_rings(isw_frontend *frontend, int32_t *fds_out, uint32_t max);
/* Any thread, never waits. */
void isw_frontend_info(isw_frontend *frontend, struct isw_frontend_info *info_out);
/* Ends all requests, unmounts, unlinks or removes, joins the threads. Blocking; NULL is allowed. */
void isw_frontend_destroy(isw_frontend *frontend);

/* Says whether this host can have ublk devices, and in error why not. */
int isw_ublk_check(struct isw_error *error);

#define ISW_UBLK_DEAD     0 /* not started, or ended */
#define ISW_UBLK_LIVE     1
#define ISW_UBLK_QUIESCED 2 /* its process is dead; requests wait */

struct isw_ublk_info {
	uint32_t state;
	uint32_t queues;
	uint32_t queue_depth;
	uint32_t request_bytes_max;
	int32_t server_pid; /* of the last process that served it, -1: none */
	uint64_t size_bytes;
	uint64_t identity; /* whatever its maker gave */
};
/* -ENODEV: there is no such device. */
int isw_ublk_info(uint32_t dev_id, struct isw_ublk_info *info_out, struct isw_error *error);
/*
 * For a device whose contents are lost with its process: serves it with an error for everything, so
 * that swapoff and umount come to their end; waits for that process's end. isw_frontend_destroy
 * then removes it. (Removing it at once would leave swap space that nothing can take out of use.)
 */
int isw_ublk_fail(uint32_t dev_id, uint64_t identity, uint32_t wait_ms_max,
		  isw_frontend **frontend_out, struct isw_error *error);
/*
 * Removes a device whose process is dead; what waits for it is failed, so look before whether it
 * is in use. -EBUSY: it is being served; -ESTALE: it has another identity. Blocking.
 */
int isw_ublk_remove(uint32_t dev_id, uint64_t identity, struct isw_error *error);

/* cdef end */

#endif /* ISW_H */
