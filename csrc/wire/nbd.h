/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The NBD protocol as far as we speak it: fixed newstyle handshake, simple replies. Names follow
 * the protocol's own document (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md).
 * Everything on the wire is big-endian; the structs are the wire's layout, their fields are read
 * and written with be*toh and htobe*.
 */
#ifndef ISWI_NBD_H
#define ISWI_NBD_H

#include <endian.h>
#include <errno.h>
#include <stdint.h>

#define NBD_INIT_MAGIC         0x4e42444d41474943ull /* "NBDMAGIC" */
#define NBD_OPTION_MAGIC       0x49484156454f5054ull /* "IHAVEOPT" */
#define NBD_OPTION_REPLY_MAGIC 0x0003e889045565a9ull
#define NBD_REQUEST_MAGIC      0x25609513u
#define NBD_REPLY_MAGIC        0x67446698u /* simple reply */

/* Handshake flags, the same bits from server (16) and client (32). */
#define NBD_FLAG_FIXED_NEWSTYLE 0x1u
#define NBD_FLAG_NO_ZEROES      0x2u

/* Transmission flags of an export. */
#define NBD_FLAG_HAS_FLAGS         0x1u
#define NBD_FLAG_READ_ONLY         0x2u
#define NBD_FLAG_SEND_FLUSH        0x4u
#define NBD_FLAG_SEND_FUA          0x8u
#define NBD_FLAG_SEND_TRIM         0x20u
#define NBD_FLAG_SEND_WRITE_ZEROES 0x40u
#define NBD_FLAG_CAN_MULTI_CONN    0x100u

#define NBD_OPT_EXPORT_NAME      1u
#define NBD_OPT_ABORT            2u
#define NBD_OPT_LIST             3u
#define NBD_OPT_STARTTLS         5u
#define NBD_OPT_INFO             6u
#define NBD_OPT_GO               7u
#define NBD_OPT_STRUCTURED_REPLY 8u

#define NBD_REP_ACK          1u
#define NBD_REP_SERVER       2u
#define NBD_REP_INFO         3u
#define NBD_REP_FLAG_ERROR   0x80000000u
#define NBD_REP_ERR_UNSUP    0x80000001u
#define NBD_REP_ERR_POLICY   0x80000002u
#define NBD_REP_ERR_INVALID  0x80000003u
#define NBD_REP_ERR_UNKNOWN  0x80000006u
#define NBD_REP_ERR_SHUTDOWN 0x80000007u
#define NBD_REP_ERR_TOO_BIG  0x80000009u

#define NBD_INFO_EXPORT     0u
#define NBD_INFO_NAME       1u
#define NBD_INFO_BLOCK_SIZE 3u

#define NBD_CMD_READ         0u
#define NBD_CMD_WRITE        1u
#define NBD_CMD_DISC         2u
#define NBD_CMD_FLUSH        3u
#define NBD_CMD_TRIM         4u
#define NBD_CMD_WRITE_ZEROES 6u

#define NBD_CMD_FLAG_FUA     0x1u
#define NBD_CMD_FLAG_NO_HOLE 0x2u

#define NBD_EPERM     1u
#define NBD_EIO       5u
#define NBD_ENOMEM    12u
#define NBD_EINVAL    22u
#define NBD_ENOSPC    28u
#define NBD_EOVERFLOW 75u
#define NBD_ENOTSUP   95u
#define NBD_ESHUTDOWN 108u

/* The protocol's bound on a name, and the payload every server is expected to take. */
#define NBD_NAME_BYTES_MAX    4096u
#define NBD_PAYLOAD_BYTES_MAX (32u << 20)

/* Zeroes after the answer to EXPORT_NAME, unless both sides set NO_ZEROES. */
#define NBD_EXPORT_NAME_ZEROES 124u

struct nbd_greeting {
	uint64_t init_magic;
	uint64_t option_magic;
	uint16_t flags;
} __attribute__((packed));

struct nbd_option {
	uint64_t magic;
	uint32_t option;
	uint32_t length;
} __attribute__((packed));

struct nbd_option_reply {
	uint64_t magic;
	uint32_t option;
	uint32_t type;
	uint32_t length;
} __attribute__((packed));

struct nbd_export_name_reply {
	uint64_t size;
	uint16_t flags;
} __attribute__((packed));

struct nbd_info_export {
	uint16_t type;
	uint64_t size;
	uint16_t flags;
} __attribute__((packed));

struct nbd_info_block_size {
	uint16_t type;
	uint32_t minimum;
	uint32_t preferred;
	uint32_t maximum;
} __attribute__((packed));

struct nbd_request {
	uint32_t magic;
	uint16_t flags;
	uint16_t type;
	uint64_t cookie; /* opaque: returned as it came */
	uint64_t offset;
	uint32_t length;
} __attribute__((packed));

struct nbd_reply {
	uint32_t magic;
	uint32_t error;
	uint64_t cookie;
} __attribute__((packed));

_Static_assert(sizeof(struct nbd_greeting) == 18, "wire layout");
_Static_assert(sizeof(struct nbd_option) == 16, "wire layout");
_Static_assert(sizeof(struct nbd_option_reply) == 20, "wire layout");
_Static_assert(sizeof(struct nbd_export_name_reply) == 10, "wire layout");
_Static_assert(sizeof(struct nbd_info_export) == 12, "wire layout");
_Static_assert(sizeof(struct nbd_info_block_size) == 14, "wire layout");
_Static_assert(sizeof(struct nbd_request) == 28, "wire layout");
_Static_assert(sizeof(struct nbd_reply) == 16, "wire layout");

/* error: 0 or -errno. What the protocol has no number for is EIO. */
static inline uint32_t nbd_error_of(int error)
{
	switch (-error) {
	case 0:
		return 0;
	case EPERM:
	case EROFS:
		return NBD_EPERM;
	case ENOMEM:
		return NBD_ENOMEM;
	case EINVAL:
		return NBD_EINVAL;
	case ENOSPC:
		return NBD_ENOSPC;
	case EOVERFLOW:
		return NBD_EOVERFLOW;
	case EOPNOTSUPP:
		return NBD_ENOTSUP;
	case ESHUTDOWN:
		return NBD_ESHUTDOWN;
	default:
		return NBD_EIO;
	}
}

/* The other way, for a client. The numbers are Linux's own. */
static inline int nbd_errno_of(uint32_t error)
{
	switch (error) {
	case 0:
		return 0;
	case NBD_EPERM:
		return -EPERM;
	case NBD_ENOMEM:
		return -ENOMEM;
	case NBD_EINVAL:
		return -EINVAL;
	case NBD_ENOSPC:
		return -ENOSPC;
	case NBD_EOVERFLOW:
		return -EOVERFLOW;
	case NBD_ENOTSUP:
		return -EOPNOTSUPP;
	case NBD_ESHUTDOWN:
		return -ESHUTDOWN;
	default:
		return -EIO;
	}
}

#endif
