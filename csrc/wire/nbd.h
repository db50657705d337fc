/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The NBD protocol as both ends of ours speak it: fixed newstyle handshake, simple replies. Only
 * constants and pure functions between bytes and numbers; every number on the wire is big-endian.
 * Source: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
 */
#ifndef ISWI_NBD_H
#define ISWI_NBD_H

#include <endian.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

/* ---- handshake */
#define NBD_MAGIC               0x4e42444d41474943ull /* "NBDMAGIC" */
#define NBD_OPTION_MAGIC        0x49484156454f5054ull /* "IHAVEOPT" */
#define NBD_OLDSTYLE_MAGIC      0x0000420281861253ull
#define NBD_OPTION_REPLY_MAGIC  0x0003e889045565a9ull
#define NBD_GREETING_BYTES      18 /* magic, option magic, u16 flags */
#define NBD_OPTION_HEADER_BYTES 16 /* option magic, u32 option, u32 length */
#define NBD_OPTION_REPLY_BYTES  20 /* reply magic, u32 option, u32 type, u32 length */
#define NBD_NAME_BYTES_MAX      4096

#define NBD_FLAG_FIXED_NEWSTYLE 0x1 /* handshake flags, and the same bits for the client's */
#define NBD_FLAG_NO_ZEROES      0x2

#define NBD_OPT_EXPORT_NAME       1u
#define NBD_OPT_ABORT             2u
#define NBD_OPT_LIST              3u
#define NBD_OPT_STARTTLS          5u
#define NBD_OPT_INFO              6u
#define NBD_OPT_GO                7u
#define NBD_OPT_STRUCTURED_REPLY  8u
#define NBD_OPT_LIST_META_CONTEXT 9u
#define NBD_OPT_SET_META_CONTEXT  10u
#define NBD_OPT_EXTENDED_HEADERS  11u

#define NBD_REP_ACK                 1u
#define NBD_REP_SERVER              2u
#define NBD_REP_INFO                3u
#define NBD_REP_META_CONTEXT        4u
#define NBD_REP_FLAG_ERROR          0x80000000u
#define NBD_REP_ERR_UNSUP           0x80000001u
#define NBD_REP_ERR_POLICY          0x80000002u
#define NBD_REP_ERR_INVALID         0x80000003u
#define NBD_REP_ERR_PLATFORM        0x80000004u
#define NBD_REP_ERR_TLS_REQD        0x80000005u
#define NBD_REP_ERR_UNKNOWN         0x80000006u
#define NBD_REP_ERR_SHUTDOWN        0x80000007u
#define NBD_REP_ERR_BLOCK_SIZE_REQD 0x80000008u
#define NBD_REP_ERR_TOO_BIG         0x80000009u

#define NBD_INFO_EXPORT           0u
#define NBD_INFO_NAME             1u
#define NBD_INFO_DESCRIPTION      2u
#define NBD_INFO_BLOCK_SIZE       3u
#define NBD_INFO_EXPORT_BYTES     12 /* u16 type, u64 size, u16 flags */
#define NBD_INFO_BLOCK_SIZE_BYTES 14 /* u16 type, u32 minimum, preferred, maximum */

/* ---- transmission flags of an export */
#define NBD_FLAG_HAS_FLAGS         0x001
#define NBD_FLAG_READ_ONLY         0x002
#define NBD_FLAG_SEND_FLUSH        0x004
#define NBD_FLAG_SEND_FUA          0x008
#define NBD_FLAG_ROTATIONAL        0x010
#define NBD_FLAG_SEND_TRIM         0x020
#define NBD_FLAG_SEND_WRITE_ZEROES 0x040
#define NBD_FLAG_CAN_MULTI_CONN    0x100
#define NBD_FLAG_SEND_CACHE        0x400
#define NBD_FLAG_SEND_FAST_ZERO    0x800

/* ---- transmission */
#define NBD_REQUEST_MAGIC      0x25609513u
#define NBD_SIMPLE_REPLY_MAGIC 0x67446698u
#define NBD_REQUEST_BYTES      28 /* magic, u16 flags, u16 command, cookie, offset, u32 length */
#define NBD_SIMPLE_REPLY_BYTES 16 /* magic, u32 error, cookie */

#define NBD_CMD_READ         0u
#define NBD_CMD_WRITE        1u
#define NBD_CMD_DISC         2u
#define NBD_CMD_FLUSH        3u
#define NBD_CMD_TRIM         4u
#define NBD_CMD_CACHE        5u
#define NBD_CMD_WRITE_ZEROES 6u
#define NBD_CMD_BLOCK_STATUS 7u

#define NBD_CMD_FLAG_FUA       0x1
#define NBD_CMD_FLAG_NO_HOLE   0x2
#define NBD_CMD_FLAG_DF        0x4
#define NBD_CMD_FLAG_FAST_ZERO 0x10

#define NBD_EPERM     1u
#define NBD_EIO       5u
#define NBD_ENOMEM    12u
#define NBD_EINVAL    22u
#define NBD_ENOSPC    28u
#define NBD_EOVERFLOW 75u
#define NBD_ENOTSUP   95u
#define NBD_ESHUTDOWN 108u

struct nbd_request {
	uint16_t flags;
	uint16_t command;
	uint64_t cookie;
	uint64_t offset;
	uint32_t length;
};

struct nbd_simple_reply {
	uint32_t error; /* NBD_E*, 0: success */
	uint64_t cookie;
};

/* ---- numbers at any alignment */
static inline void nbd_put16(void *at, uint16_t value)
{
	value = htobe16(value);
	memcpy(at, &value, sizeof(value));
}

static inline void nbd_put32(void *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, sizeof(value));
}

static inline void nbd_put64(void *at, uint64_t value)
{
	value = htobe64(value);
	memcpy(at, &value, sizeof(value));
}

static inline uint16_t nbd_get16(const void *at)
{
	uint16_t value;

	memcpy(&value, at, sizeof(value));
	return be16toh(value);
}

static inline uint32_t nbd_get32(const void *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return be32toh(value);
}

static inline uint64_t nbd_get64(const void *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return be64toh(value);
}

/* ---- messages. put: exactly the _BYTES of that message; get: -EPROTO on a wrong magic. */
static inline void nbd_put_request(void *at, const struct nbd_request *request)
{
	char *to = at;

	nbd_put32(to, NBD_REQUEST_MAGIC);
	nbd_put16(to + 4, request->flags);
	nbd_put16(to + 6, request->command);
	nbd_put64(to + 8, request->cookie);
	nbd_put64(to + 16, request->offset);
	nbd_put32(to + 24, request->length);
}

static inline int nbd_get_request(const void *at, struct nbd_request *request)
{
	const char *from = at;

	if (nbd_get32(from) != NBD_REQUEST_MAGIC)
		return -EPROTO;
	request->flags = nbd_get16(from + 4);
	request->command = nbd_get16(from + 6);
	request->cookie = nbd_get64(from + 8);
	request->offset = nbd_get64(from + 16);
	request->length = nbd_get32(from + 24);
	return 0;
}

static inline void nbd_put_simple_reply(void *at, const struct nbd_simple_reply *reply)
{
	char *to = at;

	nbd_put32(to, NBD_SIMPLE_REPLY_MAGIC);
	nbd_put32(to + 4, reply->error);
	nbd_put64(to + 8, reply->cookie);
}

static inline int nbd_get_simple_reply(const void *at, struct nbd_simple_reply *reply)
{
	const char *from = at;

	if (nbd_get32(from) != NBD_SIMPLE_REPLY_MAGIC)
		return -EPROTO;
	reply->error = nbd_get32(from + 4);
	reply->cookie = nbd_get64(from + 8);
	return 0;
}

static inline void nbd_put_option(void *at, uint32_t option, uint32_t length)
{
	char *to = at;

	nbd_put64(to, NBD_OPTION_MAGIC);
	nbd_put32(to + 8, option);
	nbd_put32(to + 12, length);
}

static inline void nbd_put_option_reply(void *at, uint32_t option, uint32_t type, uint32_t length)
{
	char *to = at;

	nbd_put64(to, NBD_OPTION_REPLY_MAGIC);
	nbd_put32(to + 8, option);
	nbd_put32(to + 12, type);
	nbd_put32(to + 16, length);
}

/* ---- errors: a negative errno to what the wire allows and back */
static inline uint32_t nbd_error_from_errno(int error)
{
	switch (-error) {
	case 0:
		return 0;
	case EPERM:
	case EACCES:
	case EROFS:
		return NBD_EPERM;
	case ENOMEM:
		return NBD_ENOMEM;
	case EINVAL:
		return NBD_EINVAL;
	case ENOSPC:
	case EDQUOT:
	case EFBIG:
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

/* What the protocol does not name counts as EINVAL, as it demands. */
static inline int nbd_error_to_errno(uint32_t error)
{
	switch (error) {
	case 0:
		return 0;
	case NBD_EPERM:
		return -EPERM;
	case NBD_EIO:
		return -EIO;
	case NBD_ENOMEM:
		return -ENOMEM;
	case NBD_ENOSPC:
		return -ENOSPC;
	case NBD_EOVERFLOW:
		return -EOVERFLOW;
	case NBD_ENOTSUP:
		return -EOPNOTSUPP;
	case NBD_ESHUTDOWN:
		return -ESHUTDOWN;
	default:
		return -EINVAL;
	}
}

#endif
